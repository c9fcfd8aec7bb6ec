"""A random Llama on the disk, for an engine and a trainer: python -m perf.rl.llama WORK"""

from __future__ import annotations

import sys
from pathlib import Path

from .size import Size, say


def random_llama(vocab: int, longest: int, **sizes: int):
    """Return a Llama in bf16 with heads of 128 and weights of unit gain.

    Log-probs are neither flat nor certain: a loader's dummy weights make all of them -log(vocab).
    sizes: The fields of a ``LlamaConfig`` that say how large it is.
    """
    import transformers

    config = transformers.LlamaConfig(
        **sizes,
        head_dim=128,
        vocab_size=vocab,
        max_position_embeddings=longest,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return random_model(config)


def random_model(config):
    """Return the causal LM of a config, in bf16, with weights of unit gain."""
    import torch
    import transformers

    torch.manual_seed(0)
    # Weights are drawn where they stay: a CPU takes half a minute for them.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.normal_(1.0, 0.1)
                continue
            is_table = "embed" in name and weight is not head
            gain = 1.0 if is_table else weight.shape[1] ** -0.5
            weight.normal_(0.0, gain * (3.0 if weight is head else 1.0))
    return model


def main(work: Path) -> None:
    """Publish the model of a run as version 1, and make a folder of it that engines load."""
    from cute_kernels.integrations.publish import WEIGHTS, folder_name, publish_weights

    size = Size.load(work)
    model = random_llama(
        size.vocab,
        longest=4096,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
    )
    publish_weights(work / "weights", model, version=1)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(work / "model")
    (work / "model" / WEIGHTS).symlink_to(work / "weights" / folder_name(1) / WEIGHTS)
    say(work, "both", "model", parameters=sum(p.numel() for p in model.parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
