"""
Seeing and changing what each executed layer reads and writes, in any decoder whose architecture is named below.

transformers' output capture says which modules are a model's layers; its own hooks stay on a model once they are
installed, keep every tensor and cannot change one, so the probe puts torch's hooks on the same modules for the length
of one forward. What counts is executed depth: a layer that a loop runs six times has six positions.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ..decoder_stack import decoder_stack


@dataclass(frozen=True)
class Anatomy:
    """
    Where an architecture keeps what its residual stream is made of.

    Args:
        attention, mlp: Paths within a layer of the modules whose output (or its first entry) is added to the stream.
            Where a norm stands between a sublayer and the stream, it is the norm.
        norm: Path within the base model of the norm in front of the head.
    """

    attention: str = "self_attn"
    mlp: str = "mlp"
    norm: str = "norm"


_LLAMA = Anatomy()
_SANDWICH = Anatomy("post_attention_layernorm", "post_feedforward_layernorm")
#: By the name of the layer's class or of one that it inherits from. Add a line for another architecture.
ANATOMIES = {
    "LoopedDecoderLayer": _LLAMA,
    "LlamaDecoderLayer": _LLAMA,
    "MistralDecoderLayer": _LLAMA,
    "Qwen2DecoderLayer": _LLAMA,
    "Qwen3DecoderLayer": _LLAMA,
    "GemmaDecoderLayer": _LLAMA,
    "Gemma2DecoderLayer": _SANDWICH,
    "Gemma3DecoderLayer": _SANDWICH,
    "HrmTextDecoderLayer": Anatomy(norm="H_module.final_norm"),
    "GPT2Block": Anatomy("attn", "mlp", "ln_f"),
}


def anatomy_of(layer: nn.Module) -> Anatomy:
    """
    Raises:
        `ValueError`: for a layer that no entry of `ANATOMIES` is for.
    """
    for parent in type(layer).__mro__:
        if parent.__name__ in ANATOMIES:
            return ANATOMIES[parent.__name__]
    name = type(layer).__name__
    raise ValueError(
        f"{name} is not in modeling_looped.diagnostics.ANATOMIES, which knows {', '.join(ANATOMIES)}. Name the modules "
        f"whose outputs are added to its residual stream: ANATOMIES[{name!r}] = Anatomy(attention='self_attn', "
        "mlp='mlp', norm='norm'). A wrong name is noticed when it is first used."
    )


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation without gradients; modes and the states of all random generators are afterwards as they were."""
    training = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, mode in training.items():
                module.training = mode
            random.setstate(states[0])
            np.random.set_state(states[1])


@dataclass(frozen=True)
class Rows:
    """
    Tokens as a model gets them, padded on the left where lengths differ.

    Args:
        input_ids (`torch.Tensor`): (batch, length).
        mask (`torch.Tensor`): (batch, length), true where a token stands.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor

    @property
    def places(self) -> torch.Tensor:
        """(batch, length): the number of each token in its row, from 0."""
        return (self.mask.cumsum(-1) - 1).clamp(min=0)

    def repeated(self, times: int) -> "Rows":
        return Rows(self.input_ids.repeat(times, 1), self.mask.repeat(times, 1))


def batches(rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[Rows]:
    """
    Lists of token ids, in their order, `batch_size` at a time.

    Raises:
        `ValueError`: where there are none, or one has fewer than two tokens.
    """
    if not rows:
        raise ValueError("There are no texts to measure on.")
    for number, row in enumerate(rows):
        if len(row) < 2:
            raise ValueError(f"Text {number} has {len(row)} tokens: at least two are needed.")
    for start in range(0, len(rows), batch_size):
        chosen = [torch.as_tensor(row, dtype=torch.long) for row in rows[start : start + batch_size]]
        longest = max(map(len, chosen))
        ids = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in chosen])
        mask = torch.stack([torch.arange(longest) >= longest - len(row) for row in chosen])
        yield Rows(ids, mask)


Edit = Callable[[int, torch.Tensor], torch.Tensor | None]


class Probe:
    """
    A model whose executed layers can be seen and changed.

    Args:
        model: A causal language model, of ours or of transformers, with or without peft's wrapper.
        num_recurrences: Passes over the core of a looped model; its configuration's by default.

    Attributes:
        depth (`int`): Number of executed layers.
        order (`list[int]`): The unique layer at each executed position, by its place in `layers`.
        boundaries (`list[int]`): Positions at which a prelude, a pass over the core, or a grown block ends.

    Raises:
        `ValueError`: for a model without one stack of known layers, or whose layers do not add up.
    """

    def __init__(self, model: PreTrainedModel, num_recurrences: int | None = None):
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        if head is None:
            raise ValueError(f"{type(model).__name__} has no language model head: load it with AutoModelForCausalLM.")
        self.model = model
        self.base = model.base_model
        self.is_looped = hasattr(model.config, "plan")
        if num_recurrences is not None and not self.is_looped:
            raise ValueError(
                f"num_recurrences={num_recurrences!r}: {type(model).__name__} has no loop whose passes could be chosen. "
                "Loop it first (modeling_looped.looping), or leave it out."
            )
        self.num_recurrences = num_recurrences
        self.layers = self._find_layers()
        self.anatomy = anatomy_of(self.layers[0])
        self.norm = self._part(self.base, self.anatomy.norm)
        self._attention = [self._part(layer, self.anatomy.attention) for layer in self.layers]
        self._mlp = [self._part(layer, self.anatomy.mlp) for layer in self.layers]
        self.order = self._execute_once()
        self.boundaries = self._find_boundaries()

    @classmethod
    def of(cls, model, num_recurrences: int | None = None) -> "Probe":
        """`model` where it is a `Probe` already, else one of it."""
        return model if isinstance(model, cls) else cls(model, num_recurrences)

    @property
    def depth(self) -> int:
        return len(self.order)

    @property
    def block(self) -> int | None:
        """Layers of a block: what a grown stack grew by, or the core of a loop that runs more than once."""
        if history := getattr(self.model.config, "history", None):
            return history[-1]["block_size"]
        sections = self.model.config.plan(self.num_recurrences).sections if self.is_looped else None
        return sections[1] if sections is not None and sections[2] > 1 else None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def is_gated(self) -> bool:
        config = self.model.config
        return getattr(config, "gate", "none") != "none" and config.num_core_layers > 0

    def rows_at_once(self, batch_size: int) -> int:
        """
        `batch_size`, but one for a model whose tokens can sit a pass out (Mixture-of-Recursions): they attend to nothing
        in it, and what attention then says, which is thrown away, depends on the padding.
        """
        return 1 if hasattr(self.model.config, "routing") else batch_size

    def batches(self, rows: Sequence[Sequence[int]], batch_size: int) -> Iterator[Rows]:
        return batches(rows, self.rows_at_once(batch_size))

    def head(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits of states that `norm` has been through, in fp32, the soft cap of a model that has one included."""
        if hasattr(self.model, "logits"):
            return self.model.logits(hidden_states).float()
        logits = self.model.get_output_embeddings()(hidden_states).float()
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def lens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The logit lens: what the model would say if the stream ended here."""
        return self.head(self.norm(hidden_states.to(self.model.dtype)))

    def run(
        self,
        rows: Rows,
        on_input: Edit | None = None,
        on_attention: Edit | None = None,
        on_mlp: Edit | None = None,
        on_output: Edit | None = None,
        **kwargs,
    ):
        """
        One forward of the base model, whose output is returned. Each function gets the number of an executed position
        and a tensor (batch, length, width): what the layer reads (`on_input`), what attention (`on_attention`) or MLP
        (`on_mlp`) add, or what it hands on (`on_output`). What it returns, if anything, takes the tensor's place.
        """
        position = -1

        def enter(layer, args, keywords):
            nonlocal position
            position += 1
            if on_input is None:
                return None
            given = args[0] if args else keywords["hidden_states"]
            if (changed := on_input(position, given)) is None:
                return None
            return ((changed, *args[1:]), keywords) if args else (args, {**keywords, "hidden_states": changed})

        def after(edit: Edit):
            def hook(module, args, output):
                changed = edit(position, output[0] if isinstance(output, tuple) else output)
                if changed is None:
                    return None
                return (changed, *output[1:]) if isinstance(output, tuple) else changed

            return hook

        hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in self.layers]
        for modules, edit in ((self._attention, on_attention), (self._mlp, on_mlp), (self.layers, on_output)):
            if edit is not None:
                hooks += [module.register_forward_hook(after(edit)) for module in modules]
        device = self.device
        # With `output_recurrences`, passes that no token takes (Mixture-of-Recursions) run too: depths stay comparable.
        asked = {"num_recurrences": self.num_recurrences, "output_recurrences": True} if self.is_looped else {}
        # A whole mask is left out, so that attention may take its fast path; a row in a batch is the row alone.
        padded = not bool(rows.mask.all())
        try:
            with undisturbed(self.model):
                return self.base(
                    input_ids=rows.input_ids.to(device),
                    attention_mask=rows.mask.long().to(device) if padded else None,
                    position_ids=rows.places.to(device),
                    use_cache=False,
                    **asked,
                    **kwargs,
                )
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, rows: Rows) -> torch.Tensor:
        """(batch, length, vocabulary), fp32."""
        with torch.no_grad():
            return self.head(self.run(rows).last_hidden_state)

    def _find_layers(self) -> list[nn.Module]:
        if hasattr(self.base, "unique_layers"):
            return list(self.base.unique_layers())
        recorded = getattr(self.base, "_can_record_outputs", None) or {}
        recorder = recorded.get("hidden_states")
        layer_class = getattr(recorder, "target_class", recorder)
        if isinstance(layer_class, type):
            found = [module for module in self.base.modules() if isinstance(module, layer_class)]
            if found:
                return found
        return decoder_stack(self.model).unique_layers

    def _part(self, owner: nn.Module, path: str) -> nn.Module:
        try:
            return owner.get_submodule(path)
        except AttributeError:
            name = type(self.layers[0]).__name__
            raise ValueError(
                f"{type(owner).__name__} has no {path!r}, which modeling_looped.diagnostics.ANATOMIES says of {name}: "
                f"set ANATOMIES[{name!r}] to the right names."
            ) from None

    def _execute_once(self) -> list[int]:
        """The order of execution, seen in one forward, in which each layer is checked to be the sum of its parts."""
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        order, parts = [], {}
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        rows = next(batches([[1 % vocabulary, 2 % vocabulary, 3 % vocabulary]], 1))
        watchers = [
            layer.register_forward_pre_hook(lambda module, args: order.append(numbers[module])) for layer in self.layers
        ]

        def on_input(position, h):
            parts["stream"] = h.detach().float().clone()

        def add(position, x):
            parts["stream"] = parts["stream"] + x.detach().float()

        def on_output(position, h):
            # Rounding of 16-bit sums is what is allowed for.
            tolerance = 1e-3 if h.dtype == torch.float32 else 5e-2
            difference = (parts["stream"] - h.float()).norm() / h.float().norm().clamp(min=1e-6)
            if not difference <= tolerance:
                layer = type(self.layers[order[-1]]).__name__
                raise ValueError(
                    f"At executed layer {position}, {layer}'s output is not its input plus the outputs of "
                    f"{self.anatomy.attention} and {self.anatomy.mlp} (relative difference {difference:.2g}): set "
                    f"modeling_looped.diagnostics.ANATOMIES[{layer!r}] to the modules that are added."
                )

        try:
            self.run(rows, on_input=on_input, on_attention=add, on_mlp=add, on_output=on_output)
        finally:
            for watcher in watchers:
                watcher.remove()
        return order

    def _find_boundaries(self) -> list[int]:
        config = self.model.config
        ends = config.plan(self.num_recurrences).ends if self.is_looped else ()
        inner = sorted({end for end in ends if 0 < end < self.depth})
        if not inner and self.block is not None:
            return list(range(self.block, self.depth, self.block))
        return inner
