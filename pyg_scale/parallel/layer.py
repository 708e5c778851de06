"""Layer parallelism: a pipeline of ranks, of which each has some layers.

The batches of a step, one or more of each rank, are the micro-batches of a pipeline of torch
(``torch.distributed.pipelining``; GPipe, Huang et al., NeurIPS 2019; 1F1B, Narayanan et al., SOSP
2019). Sampled batches are handed over whole: a rank gets the edges and features that its layers
use, and from the rank before it the rows of hidden layers, padded to one size.

A forward keeps nothing but its inputs. The backward pass computes it again, stage by stage.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pyg_scale.parallel.base import Parallel, differentiate
from pyg_scale.parallel.calls import Call, bound_to, described_by, dtype_of, keys_of, named
from pyg_scale.parallel.mean import MeanModule, mean_over_seeds
from pyg_scale.parallel.peers import Peers
from pyg_scale.parallel.pipeline import (
    Crossing,
    Program,
    Stage,
    Work,
    even_stages,
    set_setting,
    settings_of,
    traced,
)
from pyg_scale.parallel.replica import (
    check_module,
    check_no_gradients,
    checked_seeds,
    functions_of,
    is_forgotten,
    versions_of,
)

_KEPT = 8  # pipelines of different sizes, and traces for different arguments


class LayerParallel(Parallel):
    """Trains on batches: each rank computes some layers of the batches of all ranks.

    Exact, as with :class:`~pyg_scale.parallel.ddp.DDP`: layers that look at a whole batch see that
    of one rank. The forward is traced by torch.fx, so it must not decide by values of tensors.

    Args:
        device_map: The rank of modules, by name, in the order of the forward: a module without one
            is on that of what is before it. Every rank must have one. By default ranks have equal
            numbers of the layers that follow edges.

    Raises:
        TypeError: If ``device_map`` is no dictionary of names and numbers.
    """

    def __init__(self, device_map: Mapping[str, int] | None = None) -> None:
        if device_map is not None and not (
            isinstance(device_map, Mapping)
            and all(isinstance(k, str) and isinstance(v, int) for k, v in device_map.items())
        ):
            raise TypeError(f"device_map must be a dictionary of names and ranks: {device_map!r}")
        self.device_map = None if device_map is None else dict(device_map)

    def wrap(self, module: nn.Module, group: Any = None) -> LayerModule:
        """Wrap a module; see :meth:`Parallel.wrap`.

        Raises:
            RuntimeError: If ``torch.distributed`` was not initialised.
            TypeError: If ``group`` is no process group.
            ValueError: If ``device_map`` has a name that is no module, or a rank without modules,
                or the module cannot be trained. The same on all ranks.
            CommError: If a rank is gone or late; names it.
        """
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        peers = Peers(group, device)
        with peers.together():
            check_module(module)
            if self.device_map is not None:
                _check_map(self.device_map, module, peers.size)
        if any(each != self.device_map for each in peers.gather(self.device_map)):
            raise ValueError("ranks have different device_map=")
        return LayerModule(module, peers, self.device_map)


def _check_map(device_map: Mapping[str, int], module: nn.Module, size: int) -> None:
    names = [name for name, _ in module.named_modules() if name]
    for name, rank in device_map.items():
        if name not in names:
            raise ValueError(
                f"device_map: the model has no module {name!r}; it has {', '.join(names)}"
            )
        if not 0 <= rank < size:
            raise ValueError(f"device_map: {name!r} is on rank {rank}, and there are {size} ranks")
    missing = sorted(set(range(size)) - set(device_map.values()))
    if missing:
        raise ValueError(f"device_map: rank {missing[0]} has no module: use fewer ranks")


class LayerModule(MeanModule):
    """A wrapped module; see :class:`~pyg_scale.parallel.ParallelModule`.

    Every rank has all parameters, and gets the gradients of all of them: optimizers, schedulers and
    checkpoints are those of one process.
    """

    def __init__(self, module: nn.Module, peers: Peers, stages: Mapping[str, int] | None) -> None:
        super().__init__()
        self.module = module
        self.peers = peers
        self._stages, self._strict = stages, stages is not None
        self._settings = settings_of(module)
        self._programs: OrderedDict[str, Program] = OrderedDict()
        self._pipelines: OrderedDict[Any, Any] = OrderedDict()
        self._work: list[Work] = []
        self._shapes: list[list[tuple[torch.dtype, list[int]]]] = []
        self._outs: list[Tensor] = []
        self._before: dict[int, Tensor] = {}
        peers.broadcast([*module.parameters(), *module.buffers()])

    # A step ################################################################################

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As of the module, for a batch of this rank. Every rank calls it.

        Raises:
            TypeError: If an argument is neither a tensor, a dictionary of tensors by type, a
                number, a text nor ``None``.
            ValueError: If the forward of the module cannot be cut into stages. On all ranks.
            RuntimeError: If ranks do different things in a step.
            CommError: If a rank is gone or late; names it.
        """
        return self._forward([(args, kwargs)])[0]

    def forward_all(self, batches: Sequence[Sequence[Any]]) -> list[Any]:
        """The outputs of several micro-batches of this rank, for a fuller pipeline.

        Args:
            batches: The arguments of each. Ranks may have different numbers, also none.

        Raises:
            Exception: See :meth:`forward`.
        """
        return self._forward([(tuple(batch), {}) for batch in batches])

    def backward(self, loss: Tensor, num_seeds: int) -> None:
        """See :meth:`~pyg_scale.parallel.ParallelModule.backward`."""
        error: Exception | None = None
        forgets = self._seeds is not None and is_forgotten(self.module, self._versions)
        try:
            num_seeds = checked_seeds(loss, num_seeds)
            if self._seeds is None:
                check_no_gradients(self.module)
            differentiate(loss, num_seeds)
        except (TypeError, ValueError, RuntimeError) as found:
            error = found
        said = {"seeds": num_seeds, "exchanges": self._exchanges, "forgets": forgets}
        said = said if error is None else {}
        _, records = self.peers.meet("backward", said, error)
        self._backward(records)

    # Forward ###############################################################################

    def _forward(self, batches: list[tuple[Any, Any]]) -> list[Any]:
        error: Exception | None = None
        bound: list[Call] = []
        try:
            bound = [bound_to(self.module, args, kwargs) for args, kwargs in batches]
            for name, value in (item for each in bound for item in each.tensors.items()):
                if value.requires_grad:
                    raise ValueError(
                        f"{name} needs a gradient, which does not leave the pipeline: put what it "
                        "comes from into the model"
                    )
        except (TypeError, ValueError) as found:
            error = found
        said = {
            "training": [layer.training for layer in self.module.modules()],
            "set": self._changed(),
            "grad": torch.is_grad_enabled(),
            "batches": [described_by(each) for each in bound],
        }
        _, records = self.peers.meet("forward", said, error)
        outs = self._computed(records, bound)
        if torch.is_grad_enabled():
            outs = [each.requires_grad_() for each in outs]
        self._outs = outs
        results = iter(outs)
        given: list[Any] = []
        for work in self._work:
            if work.owner == self.peers.rank:
                keys = work.program.out_keys
                views = [next(results) for _ in keys or [None]]
                views = [each.view_as(each) for each in views]
                given.append(views[0] if keys is None else dict(zip(keys, views, strict=True)))
        return given

    def _computed(self, records: list[Any], bound: list[Call]) -> list[Tensor]:
        """The results of the batches of this rank. Every rank calls it."""
        given = [each for each in records if each]
        if any(each["training"] != given[0]["training"] for each in given):
            raise RuntimeError("some ranks train the model and others evaluate it")
        if any(each["grad"] != given[0]["grad"] for each in given):
            raise RuntimeError("some ranks compute with gradients and others without")
        for each in given:
            if other := sorted(dict(each["set"].items() ^ given[0]["set"].items())):
                raise RuntimeError(
                    f"ranks have set {other[0]!r} of the model to different values since wrap()"
                )
        if not records[self.peers.rank]:
            with self.peers.announced():
                self._follow(given[0])
        described = [
            (rank, each) for rank, said in enumerate(records) if said for each in said["batches"]
        ]
        keys = [_key(each, given[0]) for _, each in described]
        programs = self._for_step(dict(zip(keys, (each for _, each in described), strict=True)))
        self._work = [
            Work(rank, programs[key], _sizes(each))
            for key, (rank, each) in zip(keys, described, strict=True)
        ]
        own = iter(bound)
        mine = [next(own) if rank == self.peers.rank else None for rank, _ in described]
        self._measure(mine)
        self._hand_over([each for _, each in described], mine)
        before = self._copied()
        with torch.no_grad():
            self._run(train=False)
        self._before = self._share_buffers(before)
        return self._outputs()

    def _changed(self) -> dict[str, str]:
        """Settings that are not as they were when the module was wrapped."""
        now, first = settings_of(self.module), self._settings
        return {name: text for name, text in now.items() if first.get(name) != text}

    def _follow(self, said: Any) -> None:
        """Take over the modes and settings of the ranks that call the forward.

        Raises:
            ValueError: If a setting cannot be set here; names it.
        """
        for layer, mode in zip(self.module.modules(), said["training"], strict=True):
            layer.training = mode
        own = self._changed()
        back = {name: self._settings[name] for name in own if name in self._settings}
        for name, text in {**back, **said["set"]}.items():
            if own.get(name) != text:
                set_setting(self.module, name, text)

    def _for_step(self, described: dict[str, Any]) -> dict[str, Program]:
        """The programs for the batches of a step, by key."""
        if new := [key for key in described if key not in self._programs]:
            with self.peers.together():
                made = {key: self._made_program(described[key]) for key in new}
            self._programs.update(made)
        found = {key: self._programs[key] for key in described}
        for key, program in found.items():
            self._programs.move_to_end(key)
            if program.is_for_once:
                del self._programs[key]
        while len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return found

    def _made_program(self, described: Any) -> Program:
        before = settings_of(self.module)
        graph = traced(self.module, described)
        if self._stages is None:
            self._stages = even_stages(self.module, graph, self.peers.size)
        made = Program(self.module, graph, self._stages, self.peers.size, self._strict)
        made.is_for_once = settings_of(self.module) != before
        return made

    def _measure(self, mine: list[Call | None]) -> None:
        """Let owners of batches find out what goes between ranks, where that is not known."""
        while new := self._unknown():
            found: dict[str, Any] = {}
            with self.peers.together():
                for number in new:
                    if (inputs := mine[number]) is None:
                        continue
                    work = self._work[number]
                    before = self._copied()
                    with torch.no_grad(), torch.random.fork_rng(devices=[]):
                        found[str(number)] = work.program.measure(inputs.tensors, work.sizes)
                    self._restore(before)
            records = self.peers.gather(found)
            for number in new:
                work = self._work[number]
                work.program.learn(records[work.owner][str(number)])
        rows = [
            [[(c.shape, c.dtype) for c in each] for each in work.program.crossings or []]
            for work in self._work
        ]
        if any(each != rows[0] for each in rows):
            raise ValueError("different tensors go between ranks for batches with other arguments")

    def _unknown(self) -> list[int]:
        """The first batch of each program of which nobody knows what goes between ranks."""
        first: dict[Program, int] = {}
        for number, work in enumerate(self._work):
            if work.program.is_open(work.sizes):
                first.setdefault(work.program, number)
        return sorted(first.values())

    def _hand_over(self, described: list[Any], mine: list[Call | None]) -> None:
        """Give each rank the inputs that its layers use."""
        ranks = range(self.peers.size)
        needed = [[work.program.needed(rank) for rank in ranks] for work in self._work]
        sent = [
            [call.tensors[name] for n, call in enumerate(mine) if call for name in needed[n][rank]]
            for rank in ranks
        ]
        own = self.peers.rank
        expected = [
            [
                (n, name, *described[n]["tensors"][name])
                for n, work in enumerate(self._work)
                if work.owner == rank
                for name in needed[n][own]
            ]
            for rank in ranks
        ]
        like = [[(dtype_of(dtype), shape) for _, _, dtype, shape in each] for each in expected]
        for rank, tensors in enumerate(_exchanged(self.peers, sent, like)):
            for (number, name, _, _), tensor in zip(expected[rank], tensors, strict=True):
                self._work[number].inputs[name] = tensor

    def _outputs(self) -> list[Tensor]:
        """Give each rank the results of its batches."""
        last, own = self.peers.size - 1, self.peers.rank
        said = [[[str(out.dtype)[6:], list(out.shape)] for out in w.outs] for w in self._work]
        shapes = self.peers.gather(said if own == last else None)[last]
        self._shapes = [[(dtype_of(dtype), shape) for dtype, shape in each] for each in shapes]
        ranks = range(self.peers.size)
        sent: list[list[Tensor]] = [
            [out for work in self._work if work.owner == rank for out in work.outs]
            for rank in ranks
        ]
        found = _exchanged(
            self.peers, sent, [self._like(own) if rank == last else [] for rank in ranks]
        )
        for work in self._work:
            work.outs = ()
        return found[last]

    def _like(self, rank: int) -> list[tuple[torch.dtype, list[int]]]:
        """The dtypes and shapes of the results of a rank."""
        pairs = zip(self._shapes, self._work, strict=True)
        return [like for each, work in pairs if work.owner == rank for like in each]

    # Backward ##############################################################################

    def _backward(self, records: list[Any]) -> None:
        """Compute all stages again, with gradients. Every rank calls it."""
        given = [each for each in records if each]
        if any(each["exchanges"] != given[0]["exchanges"] for each in given):
            raise RuntimeError("some ranks are within no_sync() and others are not")
        if not self._work:
            raise RuntimeError("backward() without a forward on any rank")
        self._return_gradients()
        after = self._copied(self._before)
        self._restore(self._before)
        with torch.enable_grad():
            self._run(train=True)
        self._restore(after)
        self._work, self._outs, self._before = [], [], {}
        seeds = records[self.peers.rank]["seeds"] if records[self.peers.rank] else 0
        if any(each["forgets"] for each in given):  # also ranks whose stages have no parameters
            self._seeds = None
        self._seeds = (self._seeds or 0) + seeds
        if given[0]["exchanges"]:
            total, self._seeds = self._seeds, None
            self.all_seeds = mean_over_seeds(self.module, total, self.peers)
        else:
            self._versions = versions_of(self.module)

    def _return_gradients(self) -> None:
        """Give the last rank the gradients of the losses by the outputs."""
        last, own = self.peers.size - 1, self.peers.rank
        grads = [torch.zeros_like(out) if out.grad is None else out.grad for out in self._outs]
        ranks = range(self.peers.size)
        sent: list[list[Tensor]] = [grads if rank == last else [] for rank in ranks]
        like = [self._like(rank) if own == last else [] for rank in ranks]
        found = [iter(each) for each in _exchanged(self.peers, sent, like)]
        if own == last:
            for work, shapes in zip(self._work, self._shapes, strict=True):
                work.grads = [next(found[work.owner]) for _ in shapes]

    # The pipeline ##########################################################################

    def _run(self, train: bool) -> None:
        """Run all micro-batches through the pipeline."""
        if not self._work:
            return
        schedule = self._pipeline(train)
        numbers = torch.arange(len(self._work), device=self.peers.device)
        first, last = self.peers.rank == 0, self.peers.rank == self.peers.size - 1
        args, kwargs = ([numbers], {}) if first else ([], {"number": numbers})
        target = {"target": numbers} if train and last else {}
        with self.peers.announced(), self.peers.explained():
            try:
                schedule.step(*args, **kwargs, **target, return_outputs=False)
            except RuntimeError as error:  # torch's says what was computed, and not what failed
                if "failed to run forward" in str(error) and isinstance(error.__cause__, Exception):
                    raise error.__cause__ from None
                raise

    def _pipeline(self, train: bool) -> Any:
        """The schedule for micro-batches of these sizes; some are kept."""
        crossings = self._work[0].program.crossings
        assert crossings is not None
        rows = [
            [[c.rows(work.sizes) for c in each] for each in work.program.crossings or []]
            for work in self._work
        ]
        shapes = [
            [(_rounded(max(1, *(of[edge][place] for of in rows))), *c.shape)
             for place, c in enumerate(each)]
            for edge, each in enumerate(crossings)
        ]  # fmt: skip
        key = (train, len(self._work), str(shapes))
        if key not in self._pipelines:
            self._pipelines[key] = self._made(train, shapes, crossings)
            if len(self._pipelines) > _KEPT:
                self._pipelines.popitem(last=False)
        self._pipelines.move_to_end(key)
        return self._pipelines[key]

    def _made(self, train: bool, shapes: Any, crossings: list[list[Crossing]]) -> Any:
        rank, size = self.peers.rank, self.peers.size

        def like(edge: int) -> tuple[Tensor, ...]:
            pairs = zip(shapes[edge], crossings[edge], strict=True)
            device = self.peers.device
            made = [torch.empty(s, dtype=dtype_of(c.dtype), device=device) for s, c in pairs]
            return tuple(each.requires_grad_() for each in made)

        last = rank == size - 1
        stage = Stage(rank, last, [] if last else shapes[rank], lambda: self._work)
        made = PipelineStage(
            stage,
            rank,
            size,
            self.peers.device,
            input_args=like(rank - 1) if rank else (torch.zeros(1, dtype=torch.int64),),
            output_args=torch.zeros(1, requires_grad=True) if last else like(rank),
            group=self.peers.group,
        )
        number = len(self._work)
        kind = Schedule1F1B if train and number >= size else ScheduleGPipe
        return kind(made, number, loss_fn=_loss if train else None, scale_grads=False)

    # Buffers ###############################################################################

    def _copied(self, places: Collection[int] | None = None) -> dict[int, Tensor]:
        """Copies of buffers, by their places among all."""
        pairs = enumerate(self.module.buffers())
        return {n: each.clone() for n, each in pairs if places is None or n in places}

    def _restore(self, before: Mapping[int, Tensor]) -> None:
        if not before:
            return
        buffers = list(self.module.buffers())
        for place, was in before.items():
            buffers[place].detach().copy_(was)

    def _share_buffers(self, before: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Let all ranks have what the layers of one have written; return what was there before.

        Raises:
            ValueError: If layers of several ranks have written into one buffer.
        """
        if not before:
            return {}
        named = dict(self.module.named_buffers())
        own = [_bytes(buffer) for buffer in named.values()]
        pairs = zip(before.values(), own, strict=True)
        changed = torch.stack([(_bytes(was) != now).any() for was, now in pairs]).int()
        writers = self.peers.sum(changed.clone()).tolist()
        for name, number in zip(named, writers, strict=True):
            if number > 1:
                self._restore(before)
                raise ValueError(
                    f"layers of {number} ranks write into the buffer {name!r}: give each a module "
                    "of its own, such as a BatchNorm, or put them on one rank, device_map="
                )
        written = [place for place, number in enumerate(writers) if number]
        if written:
            # As bytes, of which only one rank has some that are not 0.
            sums = self.peers.sum(torch.cat([own[n] * changed[n].byte() for n in written]))
            buffers = [each.detach() for each in named.values()]
            for n, part in zip(written, sums.split([len(own[n]) for n in written]), strict=True):
                # Copied, as numbers may begin at a place that their size does not divide.
                buffers[n].copy_(part.clone().view(buffers[n].dtype).view(buffers[n].shape))
        return {n: before[n] for n in written}

    # Epochs ################################################################################

    @contextmanager
    def join(self, *steps: Any) -> Iterator[None]:
        """See :meth:`~pyg_scale.parallel.ParallelModule.join`."""
        functions = functions_of(steps)
        yield
        while True:
            act, records = self.peers.meet("join", None)
            if act == "join":
                return
            if act == "forward":
                with torch.set_grad_enabled(next(each for each in records if each)["grad"]):
                    self._outs = self._computed(records, [])
                continue
            if self._seeds is None or any(each["forgets"] for each in records if each):
                self.module.zero_grad()
            self._backward(records)
            if next(each for each in records if each)["exchanges"]:
                for step in functions:
                    step()


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """The output of the last stage is the loss already."""
    return output.sum()


def _key(batch: Any, said: Any) -> str:
    """All that the steps of a forward depend on."""
    of_model = [said["training"], sorted(said["set"].items())]
    return json.dumps([batch["fixed"], sorted(batch["tensors"]), batch["keys"], *of_model])


def _sizes(batch: Any) -> dict[str, int]:
    """Number of nodes and of edges, by type if there are types.

    Nodes are the rows of the first tensor, edges the columns of the first that has two rows; of
    types, of those in dictionaries.
    """
    shapes, keys = {name: shape for name, (_, shape) in batch["tensors"].items()}, keys_of(batch)
    found: dict[str, int] = {}
    for name, key in ((name, key) for name, each in keys.items() for key in each):
        shape = shapes.pop(named(name, key))
        if isinstance(key, str):
            found.setdefault(f"node {key}", shape[0] if shape else 0)
        elif len(shape) == 2 and shape[0] == 2:
            found.setdefault(f"edge {' '.join(key)}", shape[1])
    if not found:
        plain = list(shapes.values())
        edges = [s[1] for s in plain[1:] if len(s) == 2 and s[0] == 2]
        found["node"] = plain[0][0] if plain and plain[0] else 0
        found["edge"] = (edges or [0])[0]
    return found


def _rounded(number: int) -> int:
    """The next number whose binary form has three digits and then zeros: at most a quarter more."""
    step = 1 << max(0, number.bit_length() - 3)
    return -(-number // step) * step


def _exchanged(
    peers: Peers, sent: list[list[Tensor]], like: list[list[tuple[torch.dtype, list[int]]]]
) -> list[list[Tensor]]:
    """Give each rank some tensors, and get those of each, in one message.

    Args:
        peers: The ranks.
        sent: The tensors for each rank.
        like: The dtype and the shape of those from each rank.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=peers.device)
    own = [torch.cat([nothing, *(_bytes(each) for each in tensors)]) for tensors in sent]
    sizes = [[_size(dtype, shape) for dtype, shape in each] for each in like]
    received = nothing.new_empty(sum(map(sum, sizes)))
    counts = [sum(each) for each in sizes]
    peers.all_to_all(received, torch.cat(own), counts, [each.numel() for each in own])
    found = []
    for block, each, lengths in zip(received.split(counts), like, sizes, strict=True):
        parts = block.split(lengths)
        # Copied, as numbers may begin at a place that their size does not divide.
        found.append([p.clone().view(d).view(s) for p, (d, s) in zip(parts, each, strict=True)])
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _size(dtype: torch.dtype, shape: list[int]) -> int:
    return torch.empty(shape, dtype=dtype, device="meta").nbytes
