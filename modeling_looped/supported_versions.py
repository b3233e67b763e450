"""One clear error, before anything else, on a transformers that these models cannot run on."""

from transformers.utils.versions import require_version


SUPPORTED_TRANSFORMERS = "transformers>=5.24,<6"

# 5.24 renamed `past_key_values` to `cache` throughout; no shim for older releases is kept.
require_version(SUPPORTED_TRANSFORMERS, f"Looped models need it. Run: pip install -U '{SUPPORTED_TRANSFORMERS}'")
