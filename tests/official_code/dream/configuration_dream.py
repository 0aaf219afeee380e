"""Where Dream's repository has its configuration; written for the tests, not Dream's code."""

from transformers import Qwen2Config


class DreamConfig(Qwen2Config):
    model_type = "Dream"

    def __init__(self, mask_token_id=151666, **options):
        super().__init__(**options)
        self.mask_token_id = mask_token_id
