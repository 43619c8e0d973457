OMP_NUM_THREADS=4 torchrun --nnodes=1:4 --nproc-per-node auto --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint "$HOST:29400" sft.py --model "$MODEL" --epochs 3
