"""A checkpoint either fits or is refused: nothing of the base model is silently re-initialised or dropped."""


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint that does not fit its model. Also a `RuntimeError`, which is what transformers raises on shapes."""


class StrictLoadingMixin:
    """`from_pretrained` that raises where transformers prints a report."""

    _head_names = ("lm_head", "score", "qa_outputs")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *model_args,
        output_loading_info=False,
        ignore_mismatched_sizes=False,
        **kwargs,
    ):
        """
        As in transformers, and strict: keys of the base model that the checkpoint lacks or has too many, and weights
        of another shape, raise `ValueError` with their list. A task head that is new to the checkpoint is reported.
        `output_loading_info=True` or `ignore_mismatched_sizes=True` return the model all the same.
        """
        model, info = super().from_pretrained(
            pretrained_model_name_or_path,
            *model_args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers' own error only points to a table printed before it
            **kwargs,
        )
        if output_loading_info:
            return model, info
        if not ignore_mismatched_sizes:
            wrong = {
                kind: sorted(key for key in info[f"{kind}_keys"] if model._is_base_key(key))
                for kind in ("missing", "unexpected")
            }
            wrong["wrong shape"] = [
                f"{key} {tuple(found)} instead of {tuple(expected)}"
                for key, found, expected in sorted(info["mismatched_keys"])
            ]
            if any(wrong.values()):
                lists = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in wrong.items() if keys)
                raise CheckpointError(
                    f"The checkpoint {str(pretrained_model_name_or_path)!r} does not fit {cls.__name__} with its "
                    f"configuration ({lists}). Correct the configuration or the file, or pass "
                    "output_loading_info=True to load it anyway and get these lists."
                )
        return model

    def _is_base_key(self, key: str) -> bool:
        part = key.split(".")[0]
        if self.base_model is self:
            return part not in self._head_names
        # In a checkpoint of the base model keys have no prefix: they start with the name of one of its parts.
        return part == self.base_model_prefix or part in dict(self.base_model.named_children())
