"""Parallel wrappers of one model on many ranks: replace them by your own exchange.

`TemplateParallel` divides batches, `TemplateGraphParallel` one graph.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from pyg_scale.parallel import GraphParallel, Parallel
from pyg_scale.parallel.base import differentiate
from pyg_scale.store.directory.data import DirectoryData


class TemplateParallel(Parallel):
    """Sums gradients and counts of seeds after the backward, in one all-reduce."""

    def wrap(self, module, group=None):
        """Wrap the module for this rank of `group`."""
        if not dist.is_initialized():
            raise RuntimeError("call torch.distributed.init_process_group first")
        return TemplateModule(module, group)


class TemplateModule(nn.Module):
    def __init__(self, module, group):
        super().__init__()
        self.module, self.group = module, group
        self.seeds, self.exchanges = 0, True
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group=group, group_src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss, num_seeds):
        if num_seeds < 0:
            raise ValueError(f"num_seeds must not be negative (got {num_seeds})")
        if not loss.requires_grad:
            raise ValueError("loss does not come from the model")
        if not self.seeds and any(p.grad is not None and p.grad.any() for p in self.trained):
            raise RuntimeError("gradients of an earlier step are there: call zero_grad() first")
        differentiate(loss, num_seeds)
        self.seeds += num_seeds
        if self.exchanges:
            self.exchange(is_active=True)

    def exchange(self, is_active):
        """Turn the sums of all ranks into means over seeds. Return True if any rank had a batch."""
        own = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.trained]
        if not is_active:
            own = [torch.zeros_like(p) for p in self.trained]
        used = [float(is_active and p.grad is not None) for p in self.trained]
        counts = torch.tensor([self.seeds, float(is_active), *used], dtype=torch.float64)
        flat = torch.cat([counts, *(gradient.flatten().double() for gradient in own)])
        dist.all_reduce(flat, group=self.group)
        seeds, active, used, flat = flat[0], flat[1], flat[2:][: len(own)], flat[2 + len(own) :]
        flat = flat / seeds.clamp(min=1)
        for p, is_used, part in zip(self.trained, used, flat.split([p.numel() for p in own])):
            p.grad = part.view_as(p).to(p.dtype) if is_used else None
        self.seeds = 0
        return bool(active)

    @contextmanager
    def join(self, *steps):
        steps = [getattr(step, "step", step) for step in steps]
        if not steps or not all(callable(step) for step in steps):
            raise TypeError("join() takes the optimizer, or functions")
        yield
        while self.exchange(is_active=False):
            for step in steps:
                step()

    @contextmanager
    def no_sync(self):
        self.exchanges = False
        try:
            yield
        finally:
            self.exchanges = True


class TemplateGraphParallel(GraphParallel):
    """Divides the loss: every rank computes the whole graph, and the loss of its own nodes."""

    def wrap(self, module, group=None, *, graph=None, inputs=None, mesh=None):
        """Wrap the module for this rank of `group`, which owns every `world_size`-th part."""
        if not isinstance(graph, DirectoryData):
            raise TypeError(f"graph must come from pyg_scale.open (got {type(graph).__name__})")
        if mesh is not None:
            raise TypeError("mesh is of no use here: leave it out")
        inputs = inputs or ("x", "edge_index")
        if missing := [name for name in inputs if name not in graph]:
            raise ValueError(f"the graph has no {', '.join(missing)}")
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        book = graph.graph_directory.books[None]
        if book.num_parts < size:
            raise ValueError(f"there are {book.num_parts} parts for {size} ranks")
        own = (book.assignment() % size == rank).nonzero().view(-1)
        return TemplateGraphModule(module, group, own, {name: graph[name] for name in inputs})


class TemplateGraphModule(TemplateModule):
    def __init__(self, module, group, own_nodes, inputs):
        super().__init__(module, group)
        self.own_nodes, self.inputs = own_nodes, inputs

    def forward(self, **replaced):
        values = dict(self.inputs)
        for name, rows in replaced.items():
            if name not in values:
                raise TypeError(f"{name} is none of the inputs {', '.join(values)}")
            if len(rows) != len(self.own_nodes):
                raise ValueError(f"{name} has {len(rows)} rows for {len(self.own_nodes)} own nodes")
            whole = torch.zeros_like(values[name])
            whole[self.own_nodes] = rows
            dist.all_reduce(whole, group=self.group)
            values[name] = whole
        return self.module(*values.values())[self.own_nodes]

    def state_dict(self, **options):
        return self.module.state_dict(**options)

    def load_state_dict(self, state, **options):
        return self.module.load_state_dict(state, **options)
