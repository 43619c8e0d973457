folder=$1; step=$(ls $folder | sed -n 's/^done-//p' | sort -n | tail -n 1); step=${step:-0}; start=$(date +%s.%N)
file=$folder/samples-0-$start.jsonl
while [ $step -lt 420 ]; do
  sleep 0.4; step=$((step + 1)); echo "step: $step"
  [ $RANK = 0 ] || continue
  where="\"start\": $start, \"time\": $(date +%s.%N)"
  echo "{$where, \"step\": $step, \"samples\": [$step], \"loss\": 1, \"ranks\": 1}" >>$file
  touch $folder/done-$step
done
[ $RANK != 0 ] || echo "{\"trainingEnded\": true}" >>$file
