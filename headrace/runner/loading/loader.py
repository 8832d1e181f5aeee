"""Model files -> an evaluated model on the device.

1. Build mlx-lm's module from the configuration. Its parameters are lazy: nothing is allocated.
2. Open the files: lazy arrays from folders (renamed by the model's own ``sanitize``), readers for GGUF.
3. Choose the form in which weights are held (below) against the budget, compare every name and shape with what the
   module expects. Only now may memory be taken.
4. Evaluate a bounded number of bytes at a time; packed weights that become plain ones are freed as we go.

Forms, best first, unless the caller says (facts measured per device):
- Metal: packed weights stay packed; plain ones keep the checkpoint's dtype.
- CUDA: affine weights of 4 or 8 bits are held packed, which decode steps read, and plain beside it, which prefills
  read; packed alone where both leave too little room. What our kernels do not take becomes plain where that leaves
  room (MLX's quantized products gain nothing from batching there).
- CPU: affine weights of 4 or 8 bits stay packed and 16-bit ones stay so where products over narrow weights are
  right and fast (``cpu/products.py``); everything else becomes float32, in which all activations are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from headrace.checkpoint.model_folder import ModelFiles
from headrace.errors import ModelFileError, StartupError
from headrace.runner import mlx_lm_adapter
from headrace.runner.cpu.narrow_weights import NarrowProducts, takes_dtype, takes_packing
from headrace.runner.loading import gguf_loader
from headrace.runner.loading.packing import Packing, dequantized, find_packings, install, parts_of, with_eight_bits
from headrace.runner.loading.weight_check import check_weights
from headrace.runner.loading.weight_piece import Piece, piece_of
from headrace.runner.products import packed_weights
from headrace.runner.substitutions import narrow_experts, packed_linear
from headrace.runner.substitutions.modules import calls_only
from headrace.runner.substitutions.narrow_experts import substitute_narrow_experts
from headrace.runner.substitutions.narrow_linear import KINDS, substitute_narrow
from headrace.runner.substitutions.weighted_experts import substitute_weighted_experts

Device = Literal["cpu", "cuda", "metal"]
Progress = Callable[[float], None]
# Kinds of weights that stay narrow on a CPU; "experts": those of experts, too.
Narrow = tuple[Literal["packed", "plain", "experts"], ...]

HALF = (mx.float16, mx.bfloat16)
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
# A form larger than the files is chosen when the weights then take at most this share of the budget.
EXPANSION_SHARE = 0.7
# Plans whose bytes differ by less are alike.
ALIKE = 1.01
# Bytes evaluated at a time: what loading needs beyond the weights themselves, about.
CHUNK_BYTES = 256 * 1024 * 1024
# How weights are held for our kernels, best first.
KERNEL_FORMS: tuple[Literal["both", "packed"], ...] = ("both", "packed")
# Tensors that no model file reads: rotary frequencies that old checkpoints saved.
_DERIVED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose weights are in memory.

    Attributes:
        model: mlx-lm's module, evaluated, in inference mode.
        config: what it was built from (normalised).
        dtype: name of the dtype in which activations are computed.
        weights_bytes: bytes of all parameters as they are held.
        packed: whether some weights are held quantized.
        notes: what was decided, one line each, for the log.
    """

    model: nn.Module
    config: dict[str, Any]
    dtype: str
    weights_bytes: int
    packed: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are held: packed where the files pack them, or plain; in ``dtype`` (None: the checkpoint's).

    ``narrow``: matrices of these kinds stay as they are in the files, for products over narrow weights.
    ``kernels``: what kernels of ours take (``packed_linear.py``) is held packed for them; with "both" plain beside
    it, and everything else is plain.
    """

    packed: bool
    dtype: mx.Dtype | None
    narrow: Narrow = ()
    kernels: Literal["packed", "both"] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A form worked out: the modules that stay packed, and every parameter as a piece.

    ``taken``: those of the packed modules that are held for our kernels. ``beside``: bytes of the plain weights
    that they get beside their packed ones, by path. ``experts``: whether those of experts stay narrow where
    others do; None: there are none, or nothing does.
    """

    form: Form
    packings: dict[str, Packing]
    pieces: list[Piece]
    taken: frozenset[str] = frozenset()
    beside: dict[str, int] = field(default_factory=dict)
    experts: Literal["narrow", "wide"] | None = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces) + sum(self.beside.values())


def load_model(
    files: ModelFiles,
    *,
    device: Device,
    dtype: str = "auto",
    keep_quantized: bool | None = None,
    memory_budget_bytes: int | None = None,
    progress: Progress | None = None,
    narrow: Narrow = (),
    products: NarrowProducts | None = None,
) -> LoadedModel:
    """Load the model that ``files`` describes.

    Args:
        files: from ``headrace.checkpoint.model_folder.describe``.
        device: what MLX computes on here.
        dtype: "auto" or a name in ``DTYPES``.
        keep_quantized: True: packed stays packed; False: dequantize; None: by device and memory.
        memory_budget_bytes: what the weights may take; None: no bound.
        progress: called with rising fractions, 0 … 1.
        narrow: kinds of weights that may stay narrow (CPU).
        products: the products over them.

    Raises ModelFileError (files and configuration disagree) or StartupError (budget) with nothing allocated.
    """
    model, plan = outline_model(
        files,
        device=device,
        dtype=dtype,
        keep_quantized=keep_quantized,
        memory_budget_bytes=memory_budget_bytes,
        narrow=narrow,
    )
    _fill(model, plan, progress)
    packed_linear.hold_packed(model, plan.taken, plan.beside)
    if plan.form.narrow and products is not None:
        substitute_narrow(model, products)
        substitute_narrow_experts(model, products)
        substitute_weighted_experts(model)
    held = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    computed = "float32" if plan.form.narrow else _activation_dtype(model)
    notes = (*files.warnings, _describe_form(files, plan, computed, held))
    return LoadedModel(model, files.config, computed, held, bool(plan.packings), notes)


def outline_model(
    files: ModelFiles,
    *,
    device: Device,
    dtype: str,
    keep_quantized: bool | None,
    memory_budget_bytes: int | None,
    narrow: Narrow = (),
) -> tuple[nn.Module, Plan]:
    """The module and how its weights will be held, checked against the files; nothing is allocated.

    Arguments and errors as ``load_model``. The module's own parameters are lazy and of any value.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise StartupError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    model = mlx_lm_adapter.build_model(files.model_file, files.config)
    make_plan = _folder_planner(files, model) if files.kind == "folder" else _gguf_planner(files, model)
    has_packed = files.quantization is not None
    kernels = device == "cuda" and has_packed
    if (narrow or kernels) and not calls_only(_settled(files), KINDS):
        narrow, kernels = (), False
    if "experts" in narrow and not (experts_of(model) and calls_only(_settled(files), narrow_experts.KINDS)):
        narrow = tuple(kind for kind in narrow if kind != "experts")
    wishes = DTYPES.get(dtype), keep_quantized, has_packed
    forms = candidate_forms(device, *wishes, narrow, kernels=kernels)
    plan = choose_plan(map(make_plan, forms), memory_budget_bytes)
    install(model, plan.packings)
    check_weights(files, model, {name: shape for piece in plan.pieces for name, shape in piece.shapes.items()})
    return model, plan


def _settled(files: ModelFiles) -> nn.Module:
    """A module to try things on."""
    model = mlx_lm_adapter.build_model(files.model_file, files.config)
    if files.kind == "gguf":
        gguf_loader.settle(files, model)
    return model


# -- which form ----------------------------------------------------------------------------------------


def candidate_forms(
    device: Device,
    dtype: mx.Dtype | None,
    keep: bool | None,
    has_packed: bool,
    narrow: Narrow = (),
    *,
    kernels: bool = False,
) -> list[Form]:
    """Forms to try, best first, for a device and the caller's wishes; ``kernels``: ours can read packed ones."""
    preferred = {
        "cpu": [Form(False, mx.float32), Form(True, None)],
        "cuda": [Form(False, None), Form(True, None)],
        "metal": [Form(True, None)],
    }[device]
    forms: list[Form] = []
    if device == "cpu" and dtype is None and not (has_packed and keep is False):
        kinds: Narrow = tuple(kind for kind in narrow if has_packed or kind != "packed")
        if kinds:
            forms.append(Form(has_packed and bool({"packed", "experts"} & set(kinds)), mx.float32, kinds))
    if kernels and has_packed and (dtype is None or dtype in HALF) and keep is not False:
        return [Form(True, dtype, kernels=held) for held in KERNEL_FORMS if keep is None or held == "packed"]
    for form in preferred if keep is None or not has_packed else [Form(keep, preferred[0].dtype)]:
        wanted = Form(form.packed and has_packed, dtype or form.dtype)
        # an MLX dtype cannot be compared with None, so forms are told apart by name
        if all(str(wanted) != str(form) for form in forms):
            forms.append(wanted)
    return forms


def choose_plan(plans: Iterable[Plan], budget: int | None) -> Plan:
    """The first plan that leaves room for the KV cache, else the smallest; StartupError when none fits at all.

    A few norms more in float32 do not make a plan larger than another one.
    """
    worked_out: list[Plan] = []
    for plan in plans:
        if budget is None or plan.nbytes <= budget * EXPANSION_SHARE:
            return plan
        worked_out.append(plan)
    smallest = min(worked_out, key=lambda plan: plan.nbytes)
    if budget is not None and smallest.nbytes > budget:
        raise StartupError(
            f"the weights take {_gib(smallest.nbytes)}, the memory plan has {_gib(budget)} for them: "
            "use a smaller or quantized model, or raise --gpu-memory-utilization"
        )
    most = min(smallest.nbytes * ALIKE, math.inf if budget is None else budget)
    return next(plan for plan in worked_out if plan.nbytes <= most)


# -- from folders --------------------------------------------------------------------------------------


def _folder_planner(files: ModelFiles, model: nn.Module) -> Callable[[Form], Plan]:
    weights: dict[str, mx.array] = {}
    for name in files.weight_files:
        for key, array in _lazy_arrays(files, name).items():
            if key in files.tensors and files.tensors[key].file == name:
                weights[key] = array
    weights = {key: array for key, array in weights.items() if not key.endswith(_DERIVED)}
    renamed = mlx_lm_adapter.sanitize(model, _in_model(weights, model))
    declared = files.quantization
    if declared is not None and declared.method == "awq":
        renamed = mlx_lm_adapter.repack_awq(renamed, files.config["quantization_config"])
    packings = find_packings(model, renamed, declared) if declared is not None else {}
    may_cast = mlx_lm_adapter.cast_predicate(model)
    kernels = packed_linear.kinds_of(model)
    experts, linear = experts_of(model), matrices_of(model)

    def plan(form: Form) -> Plan:
        matrices = _staying("packed", form.narrow, linear, experts)
        given, packed = with_eight_bits(renamed, packings, matrices)
        kept = packed if form.packed else {}
        taken = {}
        if form.kernels is not None:
            scales = {path: form.dtype or renamed[f"{path}.scales"].dtype for path in packings}
            taken = {path: one for path, one in packings.items() if path in kernels and _taken(one, scales[path])}
        if form.kernels == "both":
            kept = taken
        if form.narrow:
            kept = {path: packing for path, packing in kept.items() if path in matrices and _stays(packing)}
        held = dequantized(given, {path: packed[path] for path in packed.keys() - kept.keys()}, form.dtype)
        stay = {f"{path}.{part}" for path in kept for part in parts_of(held, path)} if form.narrow else set()
        names = (f"{path}.weight" for path in _staying("plain", form.narrow, linear, experts))
        stay |= {name for name in names if name in held and takes_dtype(held[name].dtype)}
        if form.dtype is not None:
            held = {
                name: _cast(array, form.dtype) if may_cast(name) and name not in stay else array
                for name, array in held.items()
            }
        pieces = [piece_of(name, array) for name, array in held.items()]
        found: Literal["narrow", "wide"] | None = None
        if form.narrow and experts:
            wide = any(held[f"{path}.weight"].dtype == mx.float32 for path in experts)
            found = "wide" if wide else "narrow"
        return Plan(form, kept, pieces, frozenset(taken), _beside(form, model, taken), found)

    return plan


def _staying(kind: Literal["packed", "plain"], narrow: Narrow, linear: set[str], experts: set[str]) -> set[str]:
    """Paths of the modules whose weights of this kind stay narrow."""
    return (linear if kind in narrow else set()) | (experts if "experts" in narrow else set())


def _taken(packing: Packing, scales: mx.Dtype) -> bool:
    """Whether kernels of ours take it."""
    affine = packing.mode == "affine" and packed_weights.takes_packing(packing.bits, packing.group_size)
    return affine and scales in HALF


def _beside(form: Form, model: nn.Module, taken: Collection[str]) -> dict[str, int]:
    """Bytes of plain 16-bit weights of the modules in ``taken`` that get some; by path."""
    if form.kernels != "both":
        return {}
    plain = packed_linear.kinds_of(model, packed_linear.WITH_PLAIN)
    return {path: 2 * plain[path] for path in taken if path in plain}


def matrices_of(model: nn.Module) -> set[str]:
    """Paths of the linear layers and embeddings that can stay narrow."""
    return {path for path, module in model.named_modules() if type(module) in KINDS}


def experts_of(model: nn.Module) -> set[str]:
    """Paths of experts' layers that can stay narrow."""
    return {path for path, module in model.named_modules() if type(module) in narrow_experts.KINDS}


def narrowable(packing: Packing) -> Packing:
    """With 8 bits where there are 5 to 7: the integers are the same."""
    return replace(packing, bits=8) if packing.bits in (5, 6, 7) else packing


def _stays(packing: Packing) -> bool:
    return takes_packing(packing.bits, packing.group_size, packing.mode)


def _in_model(weights: dict[str, mx.array], model: nn.Module) -> dict[str, mx.array]:
    """Checkpoints of a bare decoder (embedding models) name its tensors as if nothing were around it."""
    inner = getattr(model, "model", None)
    if "embed_tokens.weight" not in weights or not isinstance(inner, nn.Module) or "embed_tokens" not in inner:
        return weights
    return {f"model.{name}": array for name, array in weights.items()}


def _lazy_arrays(files: ModelFiles, name: str) -> dict[str, mx.array]:
    try:
        loaded = mx.load(str(files.path / name))
    except (RuntimeError, ValueError, OSError):
        raise ModelFileError(f"{name}: cannot be read") from None
    if not isinstance(loaded, dict):
        raise ModelFileError(f"{name}: holds no named tensors")
    return loaded


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array


# -- from GGUF -----------------------------------------------------------------------------------------


def _gguf_planner(files: ModelFiles, model: nn.Module) -> Callable[[Form], Plan]:
    gguf_loader.settle(files, model)
    linear, experts = matrices_of(model), experts_of(model)
    kernels = packed_linear.kinds_of(model)

    def plan(form: Form) -> Plan:
        dtype = gguf_dtype(files, form)
        packings = gguf_loader.packings(files) if form.packed else {}
        if form.kernels is not None:
            exact = gguf_loader.exact(files) if form.kernels == "both" else packings.keys()
            taken = {path: packings[path] for path in packings.keys() & kernels.keys() & exact}
            taken = {path: packing for path, packing in taken.items() if _taken(packing, dtype)}
            kept = taken if form.kernels == "both" else packings
            pieces = gguf_loader.pieces(files, kept, dtype)
            return Plan(form, kept, pieces, frozenset(taken), _beside(form, model, taken))
        if not form.narrow:
            return Plan(form, packings, gguf_loader.pieces(files, packings, dtype))
        exact = gguf_loader.exact(files)
        matrices = _staying("packed", form.narrow, linear, experts)
        packings = {path: narrowable(packings[path]) for path in packings.keys() & exact & matrices}
        packings = {path: packing for path, packing in packings.items() if _stays(packing)}
        narrow = _staying("plain", form.narrow, linear, experts)
        pieces = gguf_loader.pieces(files, packings, dtype, exact_scales=True, narrow=narrow)
        held = packings.keys() | narrow & gguf_loader.sixteen_bits(files)
        found: Literal["narrow", "wide"] = "narrow" if experts <= held else "wide"
        return Plan(form, packings, pieces, experts=found if experts else None)

    return plan


def gguf_dtype(files: ModelFiles, form: Form) -> mx.Dtype:
    """GGUF names no dtype to compute in; bfloat16 has the range that every model needs."""
    return form.dtype or (mx.float16 if files.dtypes[0] == "F16" else mx.bfloat16)


# -- filling -------------------------------------------------------------------------------------------


def _fill(model: nn.Module, plan: Plan, progress: Progress | None) -> None:
    """Make and evaluate all pieces, at most about ``CHUNK_BYTES`` between two evaluations."""
    total, done, pending = max(plan.nbytes, 1), 0, 0
    made: dict[str, mx.array] = {}
    pieces = plan.pieces
    if progress is not None:
        progress(0.0)
    while pieces:
        piece = pieces.pop(0)
        made.update(piece.make())
        pending += piece.nbytes
        if pending >= CHUNK_BYTES or not pieces:
            _put(model, made)
            done, pending = done + pending, 0
            made.clear()
            if progress is not None:
                progress(done / total)
    mx.eval(model.parameters())


def _put(model: nn.Module, made: Mapping[str, mx.array]) -> None:
    arrays: Sequence[tuple[str, mx.array]] = list(made.items())
    mx.eval([array for _, array in arrays])
    model.load_weights(arrays, strict=False)


def _activation_dtype(model: nn.Module) -> str:
    """Of the floating parameters that are not scales of packed weights, the one with the most values decides."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            key = str(array.dtype).removeprefix("mlx.core.")
            sizes[key] = sizes.get(key, 0) + array.size
    return max(sizes, key=lambda key: sizes[key]) if sizes else "float32"


def _describe_form(files: ModelFiles, plan: Plan, dtype: str, held: int) -> str:
    stored = "/".join(files.dtypes[:3])
    if plan.form.narrow:
        how = f"{narrow_text(plan)}, computed in float32"
    elif plan.packings:
        bits = sorted({packing.bits for packing in plan.packings.values()})
        beside = f", and {dtype} beside it" if plan.beside else ""
        how = f"packed ({'/'.join(map(str, bits))} bits, scales {dtype}){beside}"
    else:
        how = dtype
    return f"weights: {stored} in the files ({_gib(files.weights_bytes)}), held as {how} ({_gib(held)})"


def narrow_text(plan: Plan) -> str:
    """What stays narrow, for people."""
    bits = {packing.bits for packing in plan.packings.values()}
    bits |= {16} if "plain" in plan.form.narrow and not plan.packings else set()
    text = f"{'/'.join(map(str, sorted(bits)))} bits" if bits else "float32"
    if plan.experts == "wide":
        return f"{text}, experts in float32"
    return f"{text}, experts in 16 bits" if plan.experts == "narrow" and not bits else text


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
