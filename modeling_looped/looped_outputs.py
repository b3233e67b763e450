"""Recorded outputs at the depth of the call."""

from functools import wraps


# No configuration has this field, which keeps transformers from dropping indices beyond the configured depth.
DEPTH_OF_THE_CALL = "depth_of_the_call"


def states_of_this_depth(forward):
    """
    Above `capture_outputs`, which would resolve a negative index of `output_hidden_states=[-1]` by the configured
    depth, and so return another layer's state where the call has a `num_recurrences` of its own.
    """

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        selected = kwargs.get("output_hidden_states")
        if isinstance(selected, (int, list, tuple)) and not isinstance(selected, bool):
            indices = [selected] if isinstance(selected, int) else selected
            recorded = self.config.depth_plan(kwargs.get("num_recurrences")).effective_depth + 1
            # An index out of range selects nothing, as in transformers: the one past the end does that.
            kwargs["output_hidden_states"] = [i % recorded if -recorded <= i < recorded else recorded for i in indices]
        return forward(self, *args, **kwargs)

    return wrapper
