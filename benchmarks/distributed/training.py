"""A small Llama that is trained on one device, and on ranks that share it: FSDP2, tensor parallel.

A step is of one micro-batch for each rank of FSDP. One device takes the micro-batches one after the
other, and adds their gradients in fp32 in the order of the ranks, as a reduce-scatter of 2 does.
Parameters are in bf16 while they compute, and in fp32 for the optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8.torch as f8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "examples/pytorch"))

from llama import Llama, Shape, rotary


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Those of the model and of a step's batch."""

    dim: int = 512
    hidden: int = 1024
    heads: int = 8
    layers: int = 3
    vocabulary: int = 512
    batch: int = 8  # sequences of a step, over all ranks
    tokens: int = 512  # of a sequence
    steps: int = 200
    lr: float = 1e-3

    @property
    def shape(self) -> Shape:
        return Shape(self.dim, self.hidden, self.heads, self.heads, self.layers)


def corpus(sizes: Sizes) -> Tensor:
    """Returns [steps, batch, tokens + 1]: each token is followed by one of four, not equally often."""
    random = torch.Generator().manual_seed(17)
    followers = torch.randint(sizes.vocabulary, (sizes.vocabulary, 4), generator=random)
    often = torch.tensor([0.6, 0.2, 0.15, 0.05])
    count, length = sizes.steps * sizes.batch, sizes.tokens + 1
    choices = torch.multinomial(often, count * length, replacement=True, generator=random)
    choices = choices.view(length, count)
    rows = [torch.randint(sizes.vocabulary, (count,), generator=random)]
    while len(rows) < length:
        rows.append(followers[rows[-1], choices[len(rows)]])
    return torch.stack(rows, 1).view(sizes.steps, sizes.batch, length)


class Model(nn.Module):
    """Tokens and targets to a loss. Ranks of `sequence` share what is between the blocks by tokens."""

    def __init__(self, llama: Llama, sequence: Any = None) -> None:
        super().__init__()
        self.llama = llama
        self.sequence = sequence

    def moved(self, x: Tensor, source: Any, target: Any) -> Tensor:
        if self.sequence is None:
            return x
        whole = DTensor.from_local(x, self.sequence, [source], run_check=False)
        part: Tensor = whole.redistribute(placements=[target]).to_local()
        return part

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        layers = self.llama.blocks
        x = self.moved(self.llama.embedding(tokens), Replicate(), Shard(1))
        for block in layers.blocks:
            x = block(x, layers.cos, layers.sin)
        x = self.llama.norm(self.moved(x, Shard(1), Replicate()))
        logits = functional.linear(x, self.llama.embedding.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def llama_of(sizes: Sizes) -> Llama:
    """Returns a model in fp32 on the CPU, with the same parameters in every call."""
    torch.manual_seed(0)
    return Llama(sizes.shape, sizes.vocabulary, sizes.tokens)


def convert(model: Any, library: str, recipe: str, gather: bool, emulate: bool) -> Llama:
    """Gives the model the recipe's linears."""
    if library == "torchao":
        import torchao.float8 as torchao

        options = torchao.Float8LinearConfig(enable_fsdp_float8_all_gather=gather, emulate=emulate)
        return torchao.convert_to_float8_training(model, config=options)  # type: ignore[no-any-return]
    if recipe != "bf16":
        config = f8.LinearConfig(recipe, emulate=emulate, enable_fsdp_float8_all_gather=gather)
        f8.convert_to_float8_training(model, config=config)
    return model  # type: ignore[no-any-return]


class OrderedReduceScatter(torch.distributed.fsdp._fully_shard._fsdp_api.ReduceScatter):
    """Adds what ranks have in their order, as one device adds its micro-batches."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        ranks = group.size()
        every = input_tensor.new_empty((ranks, input_tensor.numel()))
        distributed.all_gather(list(every), input_tensor.flatten(), group=group)
        own = every.view(ranks, ranks, -1)[:, group.rank()]
        output_tensor.copy_(own[0])
        for other in own[1:]:
            output_tensor.add_(other)
        if op == distributed.ReduceOp.AVG:
            output_tensor.div_(ranks)
        elif op != distributed.ReduceOp.SUM:
            raise NotImplementedError(f"{op} of gradients")


def share_by_fsdp(model: Model, mesh: Any, ordered: bool) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.llama.blocks.blocks, model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
        if ordered:
            sharded.set_custom_reduce_scatter(OrderedReduceScatter())


def share_by_tensors(llama: Llama, mesh: Any, by_tokens: bool, ours: bool) -> None:
    column = f8.Float8ColwiseParallel if ours else ColwiseParallel
    row = f8.Float8RowwiseParallel if ours else RowwiseParallel
    layout = Shard(1) if by_tokens else Replicate()
    plan: dict[str, Any] = {
        name: column(input_layouts=layout) for name in ("q", "k", "v", "mlp.gate", "mlp.up")
    }
    plan.update({name: row(output_layouts=layout) for name in ("o", "mlp.down")})
    if by_tokens:
        plan.update({name: SequenceParallel() for name in ("attention_norm", "mlp_norm")})
    for block in llama.blocks.blocks:
        parallelize_module(block, mesh, plan)


def add_up_partial_sums(llama: Llama, count: int) -> None:
    """Rounds what tensor parallelism reduces over ranks, as a sum of `count` tensors is rounded."""
    random = torch.Generator(next(llama.parameters()).device).manual_seed(23)

    def rounded(whole: Tensor) -> Tensor:
        with torch.no_grad():
            parts = torch.randn(
                (count - 1, *whole.shape), generator=random, device=whole.device, dtype=whole.dtype
            )
            parts *= whole.std() / count**0.5
            last = whole - parts.sum(0)
        for part in parts:
            last = last + part
        return whole + (last - whole).detach()

    def of_outputs(_: nn.Module, __: Any, y: Tensor) -> Tensor:
        return rounded(y)

    def of_gradients(_: nn.Module, __: Any, y: Tensor) -> None:
        if y.requires_grad:
            y.register_hook(rounded)

    for block in llama.blocks.blocks:
        for name in ("o", "mlp.down"):
            block.get_submodule(name).register_forward_hook(of_outputs)
        for name in ("attention_norm", "mlp_norm"):
            getattr(block, name).register_forward_hook(of_gradients)


def fsdp_rounds_gradients() -> bool:
    """Tells whether FSDP rounds gradients to param_dtype before ranks add them in reduce_dtype.

    PyTorch 2.13's does. 2.15's takes what backward gives, which is fp32 for the weight of a norm.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    return not hasattr(FSDPParam, "unsharded_grad_dtype")


class Masters:
    """Parameters in bf16 with masters in fp32, and the sum of the gradients of micro-batches."""

    def __init__(self, model: nn.Module, whole: nn.Module) -> None:
        """whole: a model in fp32, which has what ranks may share."""
        self.pairs = []
        for parameter, each in zip(model.parameters(), whole.parameters(), strict=True):
            if not fsdp_rounds_gradients():
                parameter.grad_dtype = None  # that of what backward gives
            master = each.detach().to(parameter.device)
            if isinstance(parameter, DTensor):
                master = distribute_tensor(master, parameter.device_mesh, parameter.placements)
            self.pairs.append((parameter, nn.Parameter(master)))

    def parameters(self) -> list[nn.Parameter]:
        return [master for _, master in self.pairs]

    def add(self) -> None:
        """Adds the gradients of a micro-batch; FSDP does the same between ranks."""
        for parameter, master in self.pairs:
            grad: Any = parameter.grad
            if isinstance(grad, DTensor):
                grad = grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            grad = grad.to(torch.float32)
            master.grad = grad if master.grad is None else master.grad + grad
            parameter.grad = None

    @torch.no_grad()
    def divide(self, by: int) -> None:
        for _, master in self.pairs:
            master.grad.div_(by)  # type: ignore[union-attr]

    @torch.no_grad()
    def write(self) -> None:
        """Gives the parameters what the optimizer made of the masters."""
        for parameter, master in self.pairs:
            parameter.copy_(master)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How a training run is shared out. `data` ranks have a micro-batch each."""

    recipe: str
    library: str = "float8"
    data: int = 1  # ranks of FSDP; more micro-batches than ranks are one after the other
    tensor: int = 1  # ranks of tensor parallelism
    by_tokens: bool = False  # sequence parallelism
    gather: bool = False  # of weights in fp8
    ordered: bool = False  # sums of gradients
    micro_batches: int = 1  # of a step
    partial_sums: int = 1  # on one device: as many as ranks of tensor parallelism would add up


@functools.cache
def mesh_of(device: str, tensor: int) -> Any:
    shape = (distributed.get_world_size() // tensor, tensor)
    return init_device_mesh(device, shape, mesh_dim_names=("data", "tensor"))


def losses(arrangement: Arrangement, sizes: Sizes, data: Tensor, device: str) -> list[float]:
    """Trains, and returns the mean loss of all micro-batches of each step, the same on all ranks."""
    given = arrangement
    mesh = mesh_of(device, given.tensor) if given.data * given.tensor > 1 else None
    llama = llama_of(sizes).to(device, torch.float32 if given.data > 1 else torch.bfloat16)
    llama.blocks.cos, llama.blocks.sin = (
        each.to(device) for each in rotary(sizes.tokens, sizes.dim // sizes.heads)
    )
    convert(llama, given.library, given.recipe, given.gather, device == "cpu")
    if given.partial_sums > 1:
        add_up_partial_sums(llama, given.partial_sums)
    tensor_mesh = mesh["tensor"] if mesh is not None and given.tensor > 1 else None
    if tensor_mesh is not None:
        share_by_tensors(llama, tensor_mesh, given.by_tokens, given.recipe != "bf16")
    model = Model(llama, tensor_mesh if given.by_tokens else None)
    masters = None
    if given.data > 1:
        assert mesh is not None
        share_by_fsdp(model, mesh["data"], given.ordered)
        mine = range(mesh["data"].get_local_rank(), given.micro_batches, given.data)
    else:
        masters = Masters(model, Model(llama_of(sizes)))
        mine = range(given.micro_batches)
    parameters = model.parameters() if masters is None else masters.parameters()
    # Some parameters may be DTensors and some not.
    optimizer = torch.optim.AdamW(parameters, lr=sizes.lr, foreach=False)
    found = []
    with sdpa_kernel(SDPBackend.MATH):
        for batch in data:
            parts = batch.chunk(given.micro_batches)
            own = torch.zeros(given.micro_batches, device=device)
            for index in mine:
                part = parts[index].to(device)
                loss = model(part[:, :-1], part[:, 1:])
                loss.backward()
                own[index] = loss.detach()
                if masters is not None:
                    masters.add()
            if given.recipe == "delayed":
                f8.sync_float8_amax_and_scale_history(model)
            if masters is not None:
                masters.divide(given.micro_batches)
            optimizer.step()
            optimizer.zero_grad()
            if masters is not None:
                masters.write()
            after_step(given, model)
            found.append(own)
    every = torch.stack(found)
    if given.data > 1 and mesh is not None:
        distributed.all_reduce(every, group=mesh["data"].get_group())  # each adds zeros to one
    return [sum(row) / len(row) for row in every.tolist()]


def after_step(given: Arrangement, model: nn.Module) -> None:
    """Makes the weights' scales for the next step."""
    if given.library == "torchao":
        if given.gather:
            import torchao.float8 as torchao

            torchao.precompute_float8_dynamic_scale_for_fsdp(model)
    elif given.recipe != "bf16":
        f8.precompute_float8_dynamic_scale_for_fsdp(model)
