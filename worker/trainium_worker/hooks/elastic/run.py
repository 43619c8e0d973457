"""One run of an elastic trainer: its batch, samples and losses, the state that it resumes, and the end of each step."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import transformers
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

import trainium_worker
from trainium_worker import memory
from trainium_worker.dcp import MemoryReader
from trainium_worker.dcp.session import open_session
from trainium_worker.hooks.elastic.checkpoints import check_version, find_checkpoint, read_identity, write_aside
from trainium_worker.hooks.elastic.identity import Identity, hash_samples
from trainium_worker.hooks.elastic.memory_state import History, MemoryState, OpenStep, collect_values
from trainium_worker.hooks.elastic.samples import (
    AnswerSeeds,
    Collate,
    Samples,
    TrainerSampler,
    derive_seed,
    seed_processor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

_log = logging.getLogger(__name__)

ENV_GLOBAL_BATCH = "TRAINIUM_GLOBAL_BATCH"
"""`program.batch.globalSize`; the agent sets it."""
ENV_REQUESTED_WORLD_SIZE = "TRAINIUM_REQUESTED_WORLD_SIZE"
"""The number of ranks of the job at its requested size; the agent sets it."""


def count_replicas(trainer: Any) -> int:
    """Return the number of ranks that compute the same samples."""
    return int(trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size())


class Run:
    """The state of an elastic trainer beside that of the trainer."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.trainer = trainer
        replicas = count_replicas(trainer)
        self.data_ranks = args.world_size // replicas
        self.data_rank = args.process_index // replicas
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self._rank_batch = args.train_batch_size * args.gradient_accumulation_steps
        processes = os.environ.get(ENV_REQUESTED_WORLD_SIZE)
        ranks = int(processes) * trainium_worker.count_launched_ranks() if processes else args.world_size
        requested = ranks // replicas
        self.global_batch = int(os.environ.get(ENV_GLOBAL_BATCH) or self._rank_batch * requested)
        self.sampler: TrainerSampler | None = None
        self.completed = 0
        """The step from which the run resumes."""
        self.memory_state: MemoryState | None = None
        """The state from which the run resumes, if it is in memory."""
        self.ignored_keys: list[str] | None = None
        """The keys of outputs that an evaluation ignores, as the script passes them to `train`."""
        self.own_sampler: Any = None
        """The trainer's own sampler, once it has created one."""
        self.micro_batch: int | None = None
        """The number of the micro-batch of the step that is computed; None outside of a step."""
        self.tokens: int | None = None
        """The tokens with a label of the step, over all ranks, if known."""
        self.is_started = self._is_loading = False
        self.is_catching_up = False
        """Whether the trainer does what it had not done after the step that it resumes."""
        self._identity: Identity | None = None
        self._ended_step = -1
        self._saved_step = -1
        self._history = History()
        self._losses = [0.0] * args.world_size
        """The losses that are not logged, by rank, before the newest step of the optimizer."""
        self._generates = self._check_generation()
        self._set_accumulation()

    def _check_generation(self) -> bool:
        """Return whether the trainer generates its samples (GRPO, RLOO). Raises ValueError if not for each step."""
        args = self.trainer.args
        if not hasattr(args, "generation_batch_size"):
            return False
        has_one_step = args.generation_batch_size in {self._rank_batch * self.data_ranks, self.global_batch}
        if not has_one_step or getattr(args, "num_iterations", 1) != 1:
            raise ValueError(
                f"{type(self.trainer).__name__} cannot be elastic: it does not generate once for each step, and what "
                "it has for later steps would be lost at a fault. Set num_iterations=1, and neither "
                f"steps_per_generation nor generation_batch_size other than {self.global_batch}"
            )
        return True

    def _set_accumulation(self) -> None:
        args = self.trainer.args
        micro_batches, rest = divmod(self.global_batch, args.train_batch_size * self.data_ranks)
        args.gradient_accumulation_steps = micro_batches + bool(rest)
        if not self._generates:
            return
        if rest:
            raise ValueError(
                f"{type(self.trainer).__name__} cannot run on {self.data_ranks} ranks: its {self.global_batch} answers "
                f"of a step do not divide by ranks x per_device_train_batch_size ({args.train_batch_size}). Declare "
                "program.batch in the job, so that only sizes that divide them are chosen"
            )
        args.steps_per_generation, args.generation_batch_size = micro_batches, self.global_batch
        if hasattr(self.trainer, "_step"):
            self.trainer._step = self.completed * micro_batches

    def wrap(self, loader: Any) -> Any:
        """Return a data loader of the trainer's samples by position."""
        trainer, args = self.trainer, self.trainer.args
        sampler = self.own_sampler
        if sampler is None:
            raise ValueError(
                f"{type(trainer).__name__} cannot be elastic: its get_train_dataloader does not use "
                "_get_train_sampler. Override _get_train_sampler instead"
            )
        if hasattr(sampler, "batch_size") and type(sampler).__name__ == "LengthGroupedSampler":
            sampler.batch_size = self.global_batch  # else the groups depend on the number of processes
        if self._generates:
            sampler.repeat_count = 1  # the micro-batches of a step share what was generated for it
        self.sampler = TrainerSampler(
            len(loader.dataset),
            sampler,
            generates=self._generates,
            global_batch=self.global_batch,
            micro_batch=args.train_batch_size,
            seed=self.seed,
            completed=self.completed,
            rank=self.data_rank,
            world_size=self.data_ranks,
            drop_last=args.dataloader_drop_last,
            pads=self._can_mask,
        )
        names = ("num_workers", "pin_memory", "prefetch_factor", "persistent_workers", "multiprocessing_context")
        elastic_loader = DataLoader(
            Samples(loader.dataset, self.seed),
            batch_sampler=self.sampler,
            collate_fn=Collate(loader.collate_fn, self.seed),
            worker_init_fn=loader.worker_init_fn,
            **{name: getattr(loader, name) for name in names},
        )
        return prepare_data_loader(
            elastic_loader, trainer.accelerator.device, num_processes=1, process_index=0, put_on_device=True
        )

    @property
    def _can_mask(self) -> bool:
        """Whether rows with masked labels do not count in the loss."""
        trainer = self.trainer
        if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
            return False
        return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)

    def weigh(self, loss: torch.Tensor, items: Any) -> torch.Tensor:
        """Return the loss of a micro-batch so that the mean over ranks is that of the whole batch."""
        if self.micro_batch is None or self.sampler is None:
            return loss
        trainer, sampler = self.trainer, self.sampler
        weight = sampler.weight(trainer.state.global_step % sampler.steps_per_epoch, self.micro_batch)
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (
                trainer.model_accepts_loss_kwargs and items is not None
            ) or trainer.compute_loss_func is not None
        factor = float(weight > 0) if is_scaled else weight * trainer.current_gradient_accumulation_steps
        return loss if factor == 1 else loss * factor

    def begin_step(self, items: Any) -> None:
        """Seed the random numbers of a step."""
        trainer = self.trainer
        if self._is_loading:
            self._is_loading = False
            trainium_worker.stage("compile")  # until the first step
        self.micro_batch = 0
        self.tokens = int(items) if items is not None else None
        seed = derive_seed("step", trainer.args.seed, trainer.state.global_step, self.data_rank)
        if trainer.args.device.type == "cpu":
            seed_processor(seed)  # torch.manual_seed would keep a call for each device that is not there
        else:
            set_seed(seed)

    def seed_answers(self, prompts: int) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which each answer of the step depends on the seed, the step and its position alone."""
        sampler, step = self.sampler, self.trainer.state.global_step
        if self.micro_batch is None or sampler is None:
            return contextlib.nullcontext()
        positions = sampler.positions(step % sampler.steps_per_epoch, 0)
        if len(positions) != prompts:  # a later turn of some of the answers
            return contextlib.nullcontext()
        return AnswerSeeds([derive_seed("answer", self.trainer.args.seed, step, position) for position in positions])

    # -- resume

    def start(self, checkpoint: str | bool | None) -> str | None:
        """Select the state to resume on all ranks, and return the folder for the trainer. Collective."""
        if self.is_started:
            raise ValueError("an elastic trainer trains once: create another one, with another output_dir")
        self.is_started = self._is_loading = True
        trainium_worker.stage("load")
        output_dir = str(self.trainer.args.output_dir)
        all_gather = open_session(None).all_gather
        step, folder = find_checkpoint(output_dir, checkpoint, all_gather)
        self.memory_state = self._find_memory_state(step, output_dir)
        saved, place = None, str(folder)
        if self.memory_state is not None:
            step, place = self.memory_state.step, f"the state of step {self.memory_state.step} in memory"
            saved = Identity.parse(self.memory_state.identity, place)
            folder, self._history = self.memory_state.write_folder(), self.memory_state.history
        elif folder is not None:
            saved = read_identity(folder)
        if folder is not None:
            check_version(folder, place, saved)
        elif isinstance(checkpoint, (str, os.PathLike)):
            raise ValueError(
                f"resume_from_checkpoint names {checkpoint}, which has no trainer_state.json: correct it or leave it "
                "out, an elastic trainer finds its checkpoints in output_dir"
            )
        self._adopt_batch(saved)
        self._identity = self._identify(output_dir, all_gather)
        if saved is not None:
            self._identity.check(saved, place)
        if folder is None:
            return None
        self.completed = step
        self._set_accumulation()
        _log.warning("resuming after step %d, from %s", step, "memory" if self.memory_state else folder)
        return str(folder)

    def _adopt_batch(self, saved: Identity | None) -> None:
        """Continue with the batch of a saved state, whatever size is requested now. Raises ValueError."""
        if saved is None:
            return
        if os.environ.get(ENV_GLOBAL_BATCH) and saved.global_batch != self.global_batch:
            raise ValueError(
                f"the run has a batch of {saved.global_batch} samples, and program.batch.globalSize is now "
                f"{self.global_batch}: set it to the first one, or choose another output_dir"
            )
        self.global_batch = saved.global_batch
        self._set_accumulation()

    def _identify(self, output_dir: str, all_gather: Callable[[Any], list[Any]]) -> Identity:
        """Return the identity of this run, by its own data loader. Collective."""
        loader = self.trainer.get_train_dataloader()
        assert self.sampler is not None, "the loader has it"
        self.sampler.check_order(all_gather)
        return Identity(
            output_dir=output_dir,
            seed=self.seed,
            samples=self.sampler.size,
            fingerprint=hash_samples(loader.dataset, self.sampler),
            rank_batch=self._rank_batch,
            global_batch=self.global_batch,
            transformers=transformers.__version__,
        )

    def _find_memory_state(self, step: int, output_dir: str) -> MemoryState | None:
        """Return the state of this run in memory, unless the checkpoint of a step is newer. Collective."""
        reader = MemoryReader()
        if reader.step is None or reader.step < step:
            return None
        values = memory.read_values(reader)
        return MemoryState(reader, values[0]) if values[0]["identity"]["output_dir"] == output_dir else None

    def continue_losses(self) -> None:
        """Continue the sums of losses, and do what the trainer had not done after the step that it resumes."""
        state, trainer = self.memory_state, self.trainer
        if state is None:
            return
        self._losses = state.restore_losses(trainer)
        open_step = state.open_step
        if open_step is None:
            return
        self.is_catching_up = True
        vars(trainer.control).update(open_step.flags)
        if open_step.is_epoch_end:
            self._ended_step = state.step
        self._end_trainer_step(open_step)
        if self._is_end_of_epoch and not open_step.is_epoch_end:
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._end_trainer_step(open_step)
        self.is_catching_up = False

    def _end_trainer_step(self, step: OpenStep) -> None:
        trainer, sampler = self.trainer, self.sampler
        assert sampler is not None, "the run has started"
        epoch = (trainer.state.global_step - 1) // sampler.steps_per_epoch
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss,
            step.grad_norm,
            trainer.model_wrapped,
            None,
            epoch,
            self.ignored_keys,
            time.time(),
            learning_rate=step.learning_rate,
        )

    # -- end of a step

    def begin_optimizer_step(self) -> None:
        """Share the losses of the step, then let the optimizer change the state. Collective."""
        memory.finish()  # its collectives are of the same group
        session = open_session(None)
        if session.is_enabled:
            losses = session.all_gather_tensors(self.trainer._tr_loss.detach().cpu())
            self._losses = [float(loss) for loss in losses]
        memory.wait()  # for the save of the step before, so that a fault costs at most one step

    def hold_step(self, grad_norm: Any, learning_rate: float | None) -> None:
        """Hold the state of a step before the trainer logs, evaluates and saves, all of which may fail."""
        trainer, control = self.trainer, self.trainer.control
        is_epoch_end = trainer.state.global_step == self._ended_step
        flags = {name: getattr(control, name) for name in ("should_log", "should_evaluate", "should_save")}
        if self.is_catching_up or not (any(flags.values()) or (self._is_end_of_epoch and not is_epoch_end)):
            return
        norm = None if grad_norm is None else float(grad_norm)
        values = self._collect(self._losses, OpenStep(flags, norm, learning_rate, is_epoch_end))
        memory.hold(trainer.state.global_step, trainer.model, trainer.optimizer, values, same_values=True)

    def end_step(self, model: Any, trial: Any) -> None:
        """Save the state of a completed step to memory, and stop if the job requests it.

        The trainer calls it after each step, and again after an epoch, whose evaluation and save come last.
        """
        trainer, step = self.trainer, self.trainer.state.global_step
        was_called, self._ended_step = step == self._ended_step, step
        if was_called != self._is_end_of_epoch:
            return
        stops = trainium_worker.should_stop() and step < trainer.state.max_steps
        is_logged = trainer._globalstep_last_logged == step
        values = self._collect([0.0] * len(self._losses) if is_logged else self._losses, None)
        is_last = trainer.control.should_training_stop
        memory.save(step, trainer.model, trainer.optimizer, values, same_values=True, is_last=is_last)
        if stops:
            memory.wait()
            is_kept = all(open_session(None).all_gather_integers(trainium_worker.is_kept(step)))
            if self._saved_step != step and not is_kept:
                trainer._save_checkpoint(model, trial)
                trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
            raise SystemExit(trainium_worker.STOPPED)

    def _collect(self, losses: list[float], open_step: OpenStep | None) -> Callable[[], dict[str, Any]]:
        assert self._identity is not None, "the run has started"
        return collect_values(self.trainer, self._identity, self._history, losses, open_step)

    @property
    def _is_end_of_epoch(self) -> bool:
        assert self.sampler is not None, "the trainer has its loader"
        return bool(self.trainer.state.global_step % self.sampler.steps_per_epoch == 0)

    @contextlib.contextmanager
    def saving(self, trial: Any) -> Iterator[None]:
        """Write the checkpoint that the trainer writes in the block aside, and report it."""
        assert self._identity is not None, "the run has started"
        trainium_worker.stage("save")
        with write_aside(self.trainer, trial, self._identity) as folder:
            yield
        self._saved_step = self.trainer.state.global_step
        trainium_worker.saved(self._saved_step, folder)
