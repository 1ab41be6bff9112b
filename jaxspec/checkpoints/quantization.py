"""Published quantised checkpoints: what `quantization_config` of config.json says, as a `Scheme`, and the kernels it makes.

Weights alone count: activations stay in 16 or 32 bits.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from jaxspec.checkpoints.checkpoint import Needed
from jaxspec.checkpoints.layout import ReadTensor, Source, Stack, Stacked, TensorPlan
from jaxspec.checkpoints.schemes import ALL, Awq, EightBits, FourBits, Gptq, PackedRows, Scheme, dequantised
from jaxspec.checkpoints.tensor_files import Tensor, TensorInfo
from jaxspec.checks import Fields, Flag, ListOf, OneOrList, Text, Whole, short
from jaxspec.config_json import SIZE
from pallas_kernels.quantized import BLOCK, Numbers, QuantizedAs

logger = logging.getLogger(__name__)

_GROUP, _BITS = Whole(-1, 2**20), Whole(1, 64)
TARGETS = ListOf(Text())
WEIGHTS = Fields({
    "num_bits": _BITS, "type": Text(), "strategy": Text(), "symmetric": Flag(), "group_size": _GROUP,
    "block_structure": ListOf(SIZE, 2),
})  # fmt: skip
CONFIG = Fields({
    "quant_method": Text(), "format": Text(), "ignore": ListOf(Text()), "modules_to_not_convert": ListOf(Text()),
    "ignored_layers": ListOf(Text()), "weight_block_size": ListOf(SIZE, 2), "fmt": Text(), "bits": _BITS, "w_bit": _BITS,
    "group_size": _GROUP, "q_group_size": _GROUP, "zero_point": Flag(), "version": Text(), "checkpoint_format": Text(),
    "lm_head": Flag(), "modules_in_block_to_quantize": ListOf(OneOrList(Text())),
})  # fmt: skip
"""The types and ranges of the fields of quantization_config that are read."""
SUPPORTED = (
    "compressed-tensors (float-quantized, int-quantized, naive-quantized, pack-quantized), fp8, fbgemm_fp8, awq and gptq of 4 bits"
)
UNUSED = ("input_scale", "input_zero_point", "output_scale", "weight_shape", "g_idx", "input_scale_ub")
"""Tensors that a quantised projection may have and that are not needed: of activations, or what is known anyway."""
MARKS = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight")
"""How the names of tensors end that only quantised projections have."""


@dataclass(frozen=True)
class QuantizedStack:
    """A kernel made of quantised projections, stacked along their rows."""

    scheme: Scheme
    modules: tuple[tuple[str, int], ...]
    """Name and rows of each."""
    k: int
    infos: Mapping[str, TensorInfo]
    """The checkpoint's tensors; empty without files."""
    idle_biases: frozenset[str] = frozenset()
    """Tensors that AutoGPTQ writes for layers without a bias: they must be zeros."""

    def needed(self) -> dict[str, Needed]:
        found: dict[str, Needed] = {}
        for module, rows in self.modules:
            found |= self.scheme.needed(module, rows, self.k, self.infos)
            found |= {name: Needed((rows,)) for name in (f"{module}.bias",) if name in self.idle_biases}
        return found

    @property
    def unused(self) -> frozenset[str]:
        """Tensors that may be there beside the needed ones."""
        return frozenset(f"{module}.{name}" for module, _ in self.modules for name in UNUSED) - self.needed().keys()

    @property
    def kind(self) -> str:
        """One of config.QUANTIZATIONS."""
        return self.scheme.kind if isinstance(self.scheme, EightBits) else "int4"

    @property
    def storage(self) -> QuantizedAs | None:
        """How it is stored. None: dequantised."""
        return self.scheme.storage(tuple(rows for _, rows in self.modules), self.k)

    def numbers(self, read: ReadTensor) -> Numbers:
        """The numbers, grouped as in `storage`."""
        parts = zip(*self._parts(read), strict=True)
        joined = Numbers(*(None if each[0] is None else np.concatenate(each) for each in parts))
        if self.storage is None or self.storage.kind != "int4":
            return joined
        again = self.k // (self.storage.group or self.k) // joined.scales.shape[1]
        return joined._replace(
            scales=np.repeat(joined.scales, again, 1), zeros=None if joined.zeros is None else np.repeat(joined.zeros, again, 1)
        )

    def join(self, read: ReadTensor) -> np.ndarray:
        return self.view(read).join()

    def view(self, read: ReadTensor) -> Stacked:
        """The kernel [k, n], dequantised to float32, before its projections are joined."""
        group = self.scheme.group if isinstance(self.scheme, FourBits) else None
        parts: list[Tensor] = [dequantised(part, self.k, group or self.k) for part in self._parts(read)]
        return Stacked(parts, is_transposed=True)

    def _parts(self, read: ReadTensor) -> Iterator[Numbers]:
        for module, rows in self.modules:
            if isinstance(self.scheme, Gptq) and f"{module}.g_idx" in self.infos:
                self.scheme.check_order(module, self.k, read)
            if (bias := f"{module}.bias") in self.idle_biases and read(bias).any():
                raise ValueError(f"tensor {bias!r} is not zero, and the model has no bias there")
            yield self.scheme.numbers(module, rows, self.k, read)

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        raise ValueError("a quantised checkpoint can't be written back")


def quantised_plan[Config](plan: TensorPlan, config: dict, infos: Mapping[str, TensorInfo]) -> TensorPlan:
    """The plan of a checkpoint whose config.json this is. Raises ValueError, naming it, for a quantisation that is not supported.
    `infos` is empty if there are no files."""
    scheme = read_scheme(config)
    if scheme is None:
        if marks := sorted(name for name in infos if name.endswith(MARKS)):
            raise ValueError(
                f"the files have quantised weights ({marks[0]}), and config.json has no quantization_config; that of ModelOpt's "
                "hf_quant_config.json is not read"
            )
        return plan
    biases = frozenset(name for name in infos if name.endswith(".bias")) - plan.needed().keys()
    layout = {keys: _quantised(source, scheme, infos, biases) for keys, source in plan.layout.items()}
    unused = (source.unused for source in layout.values() if isinstance(source, QuantizedStack))
    return replace(plan, layout=layout, ignored=plan.ignored.union(*unused))


def _quantised(source: Source, scheme: Scheme, infos: Mapping[str, TensorInfo], biases: frozenset[str]) -> Source:
    """The source, or its quantised tensors: those in the files or, without files, all that the scheme covers. `biases`: those
    in the files that the model has no place for."""
    if not isinstance(source, Stack) or not source.is_kernel:
        return source
    (k,) = source.columns
    modules = tuple((name.removesuffix(".weight"), rows) for name, rows in source.tensors)

    def is_quantised(module: str, rows: int) -> bool:
        if not infos:
            return scheme.covers(module)
        weight = infos.get(f"{module}.weight")
        if weight is not None and weight.dtype.name.startswith("float8") and scheme.covers(module):
            return True  # even without its scale, so that its absence is noticed
        return not scheme.needed(module, rows, k, infos).keys().isdisjoint(infos.keys() - {f"{module}.weight"})

    found = {module for module, rows in modules if is_quantised(module, rows)}
    if not found:
        return source
    if len(found) < len(modules):
        raise ValueError(f"{', '.join(sorted(found))} are quantised, but not what is computed with them in one product")
    idle = biases & {f"{module}.bias" for module, _ in modules} if isinstance(scheme, Gptq) else frozenset[str]()
    return QuantizedStack(scheme, modules, k, infos, idle)


def read_scheme(config: dict) -> Scheme | None:
    """The scheme that a config.json describes; None: none. Raises ValueError, naming it, for one that is not supported."""
    found = config.get("quantization_config") or config.get("compression_config")
    if found is None:
        return None
    settings = CONFIG.clean("config.json: quantization_config", found)
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else None)
    if method not in SCHEMES:
        raise unsupported(f"quant_method {short(method)}")
    return SCHEMES[method](settings)


def unsupported(what: str) -> ValueError:
    return ValueError(f"config.json: quantization_config with {what} is not supported; supported are {SUPPORTED}")


def _compressed_tensors(settings: dict[str, Any]) -> Scheme | None:
    if settings.get("transform_config"):  # rotations of weights and activations
        raise unsupported("a transform_config")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise unsupported("no config_groups")
    _say_if_activations(any(group.get("input_activations") for group in groups.values()))
    groups = {name: group for name, group in groups.items() if group.get("weights") is not None}
    if not groups:  # only the cache or the attention is quantised
        return None
    weights = [WEIGHTS.clean("config.json: quantization_config: weights", group.get("weights")) for group in groups.values()]
    if any(each != weights[0] for each in weights):
        raise unsupported("several kinds of weights")
    form, each = settings.get("format") or next(iter(groups.values())).get("format"), weights[0]
    bits, kind = each.get("num_bits"), each.get("type")
    strategy = each.get("strategy") or {None: "tensor", -1: "channel"}.get(each.get("group_size"), "group")  # as the library
    lists = (TARGETS.clean("config.json: quantization_config: targets", group.get("targets") or [ALL]) for group in groups.values())
    common = f"compressed-tensors {form}", tuple(settings.get("ignore") or ()), tuple(chain(*lists))
    if form in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and kind in ("float", "int"):
        if strategy not in ("tensor", "channel", "block") or each.get("symmetric") is False:
            raise unsupported(f"{form} weights with strategy {short(strategy)}, symmetric {each.get('symmetric', True)}")
        blocks = each.get("block_structure") or [BLOCK, BLOCK]
        if strategy == "block" and (kind, blocks) != ("float", [BLOCK, BLOCK]):
            raise unsupported(f"blocks of {blocks}, type {kind}")
        return EightBits(*common, kind="fp8" if kind == "float" else "int8", strategy=strategy)
    if form == "pack-quantized" and bits == 4 and kind == "int":
        if strategy not in ("group", "channel") or each.get("actorder") == "group":
            raise unsupported(f"{form} weights with strategy {short(strategy)}, actorder {short(each.get('actorder'))}")
        group = each.get("group_size") if strategy == "group" else None
        return PackedRows(*common, group=_group(group), has_zeros=each.get("symmetric") is False)
    raise unsupported(f"format {short(form)} of {short(bits)} bits, type {short(kind)}")


def _fp8(settings: dict[str, Any]) -> Scheme:
    ignored = ("lm_head", *(settings.get("modules_to_not_convert") or settings.get("ignored_layers") or ()))
    if settings.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise unsupported(f"fmt {short(settings['fmt'])}")
    _say_if_activations(settings.get("activation_scheme") is not None)
    block = settings.get("weight_block_size")
    if block is None:
        return EightBits("fp8", ignored)
    if block != [BLOCK, BLOCK]:
        raise unsupported(f"weight_block_size {block}")
    return EightBits("fp8", ignored, strategy="block", scale="weight_scale_inv")


def _fbgemm_fp8(settings: dict[str, Any]) -> Scheme:
    _say_if_activations(True)
    return EightBits("fbgemm_fp8", ("lm_head", *(settings.get("modules_to_not_convert") or ())), strategy="channel")


def _awq(settings: dict[str, Any]) -> Scheme:
    bits, version = settings.get("bits") or settings.get("w_bit") or 4, settings.get("version") or "gemm"
    if bits != 4 or version.lower() != "gemm" or settings.get("zero_point") is False:
        raise unsupported(f"awq of {bits} bits, version {short(version)}, zero_point {settings.get('zero_point', True)}")
    group = settings.get("group_size") or settings.get("q_group_size") or 128
    return Awq("awq", ("lm_head", *(settings.get("modules_to_not_convert") or ())), group=_group(group))


def _gptq(settings: dict[str, Any]) -> Scheme:
    form = settings.get("checkpoint_format") or "gptq"
    if settings.get("bits") != 4 or form not in ("gptq", "gptq_v2"):
        raise unsupported(f"gptq of {settings.get('bits')} bits, checkpoint_format {short(form)}")
    if settings.get("dynamic"):
        raise unsupported("gptq whose layers differ (dynamic)")
    ignored = () if settings.get("lm_head") else ("lm_head",)
    ignored += tuple(settings.get("modules_to_not_convert") or ())
    blocks = settings.get("modules_in_block_to_quantize") or [ALL]
    targets = (*chain(*([each] if isinstance(each, str) else each for each in blocks)), "lm_head")
    return Gptq("gptq", ignored, targets, group=_group(settings.get("group_size", 128)), zeros_are_less=form == "gptq")


def _group(size: int | None) -> int | None:
    """Numbers that share a scale. None: all of a row."""
    if size == 0:
        raise unsupported("group_size 0")
    return None if size in (None, -1) else size


def _say_if_activations(quantised: bool) -> None:
    if quantised:
        logger.info("the checkpoint asks for quantised activations too: they stay in 16 or 32 bits here, which is more exact")


SCHEMES: dict[str, Callable[[dict[str, Any]], Scheme | None]] = {
    "compressed-tensors": _compressed_tensors, "fp8": _fp8, "fbgemm_fp8": _fbgemm_fp8, "awq": _awq, "gptq": _gptq,
}  # fmt: skip
