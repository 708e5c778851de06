"""Training on the ranks of Ray Train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pyg_scale_ray.cluster import require_ray


def fit(
    train: Callable[..., Any],
    config: Mapping[str, Any] | None = None,
    *,
    num_workers: int | tuple[int, int],
    folder: str | Path,
    name: str = "pyg_scale",
    max_failures: int = 3,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    timeout: float = 300.0,
    **options: Any,
) -> Any:
    """Train on ranks that Ray Train starts, watches and starts again.

    ``train`` is a script as for torchrun: its first line is ``with pyg_scale.distributed.init() as
    context``, which finds rank, world size and addresses in the process group of Ray Train. Graphs
    are opened, models wrapped and checkpoints saved as ever.

    If a worker dies, Ray ends the others and starts all again, up to ``max_failures`` times. They
    go on from the last :class:`pyg_scale.train.Checkpoint`, whose ``load()`` the function calls
    first: then nothing is lost but the steps after it, and for as many ranks the parameters are
    those of a run that was not disturbed, to the bit.

    Args:
        train: A function of ``config``, or of nothing if that is ``None``. Ray sends it to the
            workers by cloudpickle, with what it refers to.
        config: What it is called with.
        num_workers: Number of ranks, or the fewest and the most: Ray then takes what there is.
        folder: Where Ray keeps its own records, on a file system that all machines share.
        name: Of the run, a folder in ``folder``.
        max_failures: How often all may be started again, -1 for ever.
        use_gpu: Whether each rank has a GPU: then the backend is NCCL, else gloo.
        resources_per_worker: Of each rank, by default one CPU.
        timeout: Seconds that a collective may take.
        **options: Of ``ray.train.ScalingConfig``.

    Returns:
        The ``ray.train.Result``.

    Raises:
        RuntimeError: If Ray was not initialised.
        TypeError: If ``train`` is no function.
        ValueError: If a number cannot be.
        ray.train.TrainingFailedError: If ``train`` raised, or workers died more often; names them.
    """
    if not callable(train):
        raise TypeError(f"train must be a function (got {type(train).__name__})")
    few, most = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    if not 1 <= few <= most:
        raise ValueError(f"num_workers must be 1 or more, or two such (got {num_workers})")
    if max_failures < -1:
        raise ValueError(f"max_failures must be -1 or more (got {max_failures})")
    if not timeout >= 1:
        raise ValueError(f"timeout must be 1 second or more (got {timeout})")
    require_ray("fit()")
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = TorchTrainer(
        train,
        train_loop_config=None if config is None else dict(config),
        torch_config=TorchConfig(backend=None if use_gpu else "gloo", timeout_s=int(timeout)),
        scaling_config=ScalingConfig(
            num_workers=num_workers,
            use_gpu=use_gpu,
            resources_per_worker=dict(resources_per_worker or {"CPU": 1}),
            **options,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(Path(folder).absolute()),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )
    return trainer.fit()
