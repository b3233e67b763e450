"""
The end of pretraining on another mixture, from a checkpoint, with a retrofitted loop where asked for (arXiv 2602.16490,
section 4.2 of its specification).

    accelerate launch -m modeling_looped.recipes.cooldown --config cooldown_nemotron --checkpoint runs/lidas/step-170000 \\
        --retrofit_layers "[8, 12]" --output_dir runs/cooldown
"""

from .launch import main


if __name__ == "__main__":
    main("cooldown")
