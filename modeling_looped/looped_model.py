"""What all looped families share: prelude - core x r - coda around transformers' parts, and the heads."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_looped import check_savable
from .depth_plan import DepthPlan
from .keyed_noise import Noise
from .looped_cache import SharedKeyValues, check_cache, slot_schedule
from .looped_outputs import LoopedCausalLMOutput, LoopedModelOutput, states_of_this_depth
from .strict_loading import StrictLoadingMixin


logger = logging.get_logger(__name__)


class LoopedPreTrainedModel(StrictLoadingMixin, PreTrainedModel):
    """What transformers asks about a model, answered alike by every family."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    def save_pretrained(self, *args, **kwargs):
        check_savable(self.config.plan_edits)
        return super().save_pretrained(*args, **kwargs)


@dataclass
class LoopedCall:
    """One forward's passes over the core: what they need, and what they were asked to tell."""

    run_core: Callable[..., torch.Tensor]  # (hidden_states, recurrence, **changes of the layers' arguments)
    anchor: torch.Tensor
    num_recurrences: int
    noise: Noise | None
    attention_mask: torch.Tensor | None
    key_values: SharedKeyValues | None
    states: list[torch.Tensor] | None
    statistics: list[dict[str, torch.Tensor]] | None
    auxiliary_loss: torch.Tensor | None = None

    def record(self, state: torch.Tensor, injection: nn.Module | None = None) -> None:
        if self.states is not None:
            self.states.append(state if injection is None else injection("close", state))


class LoopedModelMixin:
    """
    The base model. A family names its `layer_class`, and has modules `norm` (the last one), `recurrence_norm` (of each
    pass's output) and `injection`, which is called with the name of a step:

        open(prelude_output, noise)                                  -> the state that the core carries
        read(anchor, state, recurrence, noise)                       -> the core's input
        write(anchor, state, output, recurrence, noise, statistics)  -> the next state; `output` is the core's, normed
        close(state)                                                 -> the coda's input

    By name, because offloading and sharding hooks fetch weights when a module is called.
    """

    layer_class: type[nn.Module]
    mask_options: dict = {}

    def __init__(self, config):
        config.validate()  # overrides of from_pretrained are plain assignments, which nothing has checked yet
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.build_layers()
        self.gradient_checkpointing = False

    def build_layers(self) -> None:
        for section in ("prelude", "core", "coda"):
            count = getattr(self.config, f"num_{section}_layers")
            setattr(self, section, nn.ModuleList(self.build_layer(section) for _ in range(count)))

    def build_layer(self, section: str) -> nn.Module:
        return self.layer_class(self.config)

    def unique_layers(self) -> list[nn.Module]:
        """What the plan's numbers name."""
        return [*self.prelude, *self.core, *self.coda]

    def embed(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, cache: Cache | None
    ) -> tuple[torch.Tensor, object]:
        """The prelude's input, and what attention gets as `position_embeddings`."""
        raise NotImplementedError

    def anchor(self, embeddings: torch.Tensor, prelude_output: torch.Tensor) -> torch.Tensor:
        """What enters every recurrence anew."""
        return prelude_output

    def noise(self, position_ids: torch.Tensor, batch_size: int) -> Noise | None:
        """The noise of a forward, in families that have any."""
        return None

    def fills_cache(self) -> bool:
        """Whether a forward that is asked for a cache, and given none, can fill one."""
        return True

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @states_of_this_depth
    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        num_recurrences: int | None = None,
        output_recurrences: bool = False,
        output_exits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LoopedModelOutput:
        r"""
        num_recurrences (`int`, *optional*):
            Passes over the core in this call, `config.num_recurrences` by default.
        output_recurrences (`bool`, *optional*, defaults to `False`):
            Asks for `recurrent_states` and, of a gated model, `gate_statistics`.
        output_exits (`bool`, *optional*, defaults to `False`):
            Asks for `exit_states`: the coda runs after every pass. Not on top of a cache that holds earlier tokens.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        config = self.config
        plan = self._checked_plan(num_recurrences)
        asked, num_recurrences = num_recurrences, plan.passes  # edits come on top of what was asked for
        schedule = slot_schedule(plan, config.kept_recurrences(num_recurrences))
        layers = self.unique_layers()

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        batch_size, length = inputs_embeds.shape[:2]
        if cache is not None:
            check_cache(cache, schedule, num_recurrences)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(length, device=inputs_embeds.device) + seen).unsqueeze(0)
            if config.learned_positions and attention_mask is not None and attention_mask.dim() == 2:
                # Padding is no token: a row of a batch has the positions that it has alone. Rotary ones are relative.
                if attention_mask.shape[-1] < seen + length:
                    raise ValueError(
                        f"attention_mask has {attention_mask.shape[-1]} columns for {seen + length} tokens: it has to say of "
                        "each token in the cache and in this call whether it counts."
                    )
                counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                position_ids = counted.gather(1, position_ids.expand(batch_size, -1))
        if output_exits and cache is not None and cache.get_seq_length() > 0:
            raise ValueError("output_exits=True needs the whole text in one call: leave the cache out.")
        if output_exits and (kwargs.get("output_hidden_states") or kwargs.get("output_attentions")):
            raise ValueError(
                "output_exits=True (loss_per_recurrence in training) runs the coda after every pass, which would be "
                "recorded too: ask for output_hidden_states and output_attentions in a call of their own."
            )
        # Before a cache of our own exists: position_ids that restart (packed rows) are only looked at without one.
        causal_mask = create_causal_mask(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
            **self.mask_options,
        )
        if use_cache and cache is None and self.fills_cache():
            cache = DynamicCache(config=config.cache_config(asked))
        key_values = self._key_values(cache, num_recurrences)
        embeddings, position_embeddings = self.embed(inputs_embeds, position_ids, cache)
        for_layers = {
            "attention_mask": causal_mask,
            "position_embeddings": position_embeddings,
            "position_ids": position_ids,
            "key_values": key_values,
            **kwargs,
        }

        def run(hidden_states: torch.Tensor, start: int, stop: int, recurrence=None, **more) -> torch.Tensor:
            """The executed positions [start, stop)."""
            for position in range(start, stop):
                place = {"cache_slot": schedule[position], "recurrence": recurrence}
                hidden_states = layers[plan.order[position]](hidden_states, **place, **{**for_layers, **more})
            return hidden_states

        def run_core(hidden_states: torch.Tensor, recurrence: int, **more) -> torch.Tensor:
            return run(hidden_states, plan.ends[recurrence], plan.ends[recurrence + 1], recurrence, **more)

        def run_coda(hidden_states: torch.Tensor, **more) -> torch.Tensor:
            return self.norm(run(hidden_states, *plan.ends[-2:], **more))

        prelude_output = run(embeddings, 0, plan.ends[0])
        call = LoopedCall(
            run_core=run_core,
            anchor=self.anchor(embeddings, prelude_output),
            num_recurrences=num_recurrences,
            noise=self.noise(position_ids, batch_size),
            attention_mask=causal_mask,
            key_values=key_values,
            states=[] if output_recurrences or output_exits else None,
            statistics=[] if output_recurrences else None,
        )
        state = self.recur(call, prelude_output)
        exits = [run_coda(earlier, key_values=None) for earlier in call.states[:-1]] if output_exits else []
        last_hidden_state = run_coda(state)
        if key_values is not None:
            key_values.finish()
        gates = call.statistics or None
        return LoopedModelOutput(
            last_hidden_state=last_hidden_state,
            cache=cache,
            recurrent_states=tuple(call.states) if output_recurrences else None,
            gate_statistics=gates and {name: torch.stack([gate[name] for gate in gates]) for name in gates[0]},
            exit_states=(*exits, last_hidden_state) if output_exits else None,
            auxiliary_loss=call.auxiliary_loss,
        )

    def recur(self, call: "LoopedCall", prelude_output: torch.Tensor) -> torch.Tensor:
        """All passes over the core: the coda's input."""
        state = self.injection("open", prelude_output, call.noise)
        detached = call.num_recurrences - (self.config.backprop_recurrences or call.num_recurrences)
        for recurrence in range(call.num_recurrences):
            call.record(state, self.injection)
            output = call.run_core(self.injection("read", call.anchor, state, recurrence, call.noise), recurrence)
            output = self.recurrence_norm(output)
            state = self.injection("write", call.anchor, state, output, recurrence, call.noise, call.statistics)
            if recurrence < detached:  # truncated backpropagation, arXiv 2604.21106, section 5.1
                state = state.detach()
                if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
                    state.requires_grad_()  # reentrant checkpointing drops a layer whose input wants no gradient
        call.record(state, self.injection)
        return self.injection("close", state)

    def _checked_plan(self, num_recurrences: int | None) -> DepthPlan:
        config = self.config
        num_recurrences = config.recurrences_or_default(num_recurrences)
        config.check_recurrences(num_recurrences)
        plan = config.plan(num_recurrences)
        if config.plan_edits:
            if config.shares_kv(num_recurrences):
                raise ValueError(
                    f"An intervention edits the plan, and kv_sharing={config.kv_sharing!r} keeps fewer passes than the "
                    f"{num_recurrences} that run: set config.kv_sharing='all' meanwhile."
                )
            if plan.passes > num_recurrences:
                config.check_recurrences(plan.passes)
        trained = config.trained_recurrences
        if plan.passes > trained and not torch.compiler.is_compiling():
            # Without the number asked for, which would make every depth a message of its own.
            logger.warning_once(
                f"More recurrences than the {trained} that this model was trained with: the loss usually rises beyond."
            )
        return plan

    def _key_values(self, cache: Cache | None, num_recurrences: int) -> SharedKeyValues | None:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if cache is not None:
                logger.warning_once("A cache is incompatible with activation checkpointing: it is not filled.")
                cache = None
            if self.config.kv_sharing == "first" and self._checkpoints_reentrantly():
                raise ValueError(
                    "kv_sharing='first' loses gradients under reentrant activation checkpointing: use "
                    "activation_checkpointing_kwargs={'use_reentrant': False}."
                )
        if cache is None and self.config.kv_sharing != "first":
            return None
        kept = self.config.kept_recurrences(num_recurrences)
        return SharedKeyValues(cache, self.config.kv_sharing, num_recurrences, kept)

    def _checkpoints_reentrantly(self) -> bool:
        layers = (module for module in self.modules() if hasattr(module, "_gradient_checkpointing_func"))
        return any(getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant") for layer in layers)


class LoopedForCausalLMMixin:
    """The language model head around a family's `model_class`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    model_class: type[PreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Of last hidden states or of `exit_states`: (batch, length, vocabulary), fp32."""
        return self.lm_head(hidden_states).float()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    @auto_docstring
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        num_recurrences: int | None = None,
        output_recurrences: bool = False,
        output_exits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> LoopedCausalLMOutput:
        r"""
        num_recurrences (`int`, *optional*):
            Passes over the core in this call, `config.num_recurrences` by default.
        output_recurrences (`bool`, *optional*, defaults to `False`):
            Asks for `recurrent_states` and, of a gated model, `gate_statistics`.
        output_exits (`bool`, *optional*, defaults to `False`):
            Asks for `exit_states`, of which `model.logits` makes the logits of every exit.
        """
        each_exit = labels is not None and self.training and getattr(self.config, "loss_per_recurrence", False)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            num_recurrences=num_recurrences,
            output_recurrences=output_recurrences,
            output_exits=output_exits or each_exit,
            **kwargs,
        )
        logits = self.logits(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            exits = [self.logits(state) for state in outputs.exit_states[1:-1]] if each_exit else []
            arguments = {"labels": labels, "vocab_size": self.config.vocab_size, **kwargs}
            losses = [self.loss_function(logits=one, **arguments) for one in (*exits, logits)]
            loss = sum(losses) / len(losses)
            if outputs.auxiliary_loss is not None:
                # Of a micro-batch whose loss is a share of the step's, so much of the auxiliary loss too.
                items = kwargs.get("num_items_in_batch")
                share = 1.0 if items is None else (labels[..., 1:] != -100).sum() / items
                loss = loss + share * outputs.auxiliary_loss
        return LoopedCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            recurrent_states=outputs.recurrent_states,
            gate_statistics=outputs.gate_statistics,
            exit_states=outputs.exit_states if output_exits else None,
            auxiliary_loss=outputs.auxiliary_loss,
        )


class LoopedTaskMixin:
    """Below the heads that transformers' generic mixins build, which ask `AutoModel` for the `model_class`."""

    model_class: type[PreTrainedModel]

    def __init__(self, config):
        super().__init__(config)
        # AutoModel asks the user for trust once more, or refuses, where the configuration class comes from the code
        # beside a checkpoint.
        AutoModel.register(type(config), self.model_class, exist_ok=True)


def register_code(config_class: type, classes: dict[str, type]) -> None:
    """Every save_pretrained then puts the family's code beside the weights, for machines without the package."""
    config_class.register_for_auto_class("AutoConfig")
    for auto_class, reference in config_class.auto_classes.items():
        if auto_class != "AutoConfig":
            classes[reference.split(".")[1]].register_for_auto_class(auto_class)
