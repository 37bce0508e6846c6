"""Papers: the models of the pipeline-parallel papers that `preset:NAME` builds, and their sources."""

from collections.abc import Mapping

from pipeplan.errors import require, require_amount, require_count

PAPERS = {
    "alexnet": "AlexNet (Krizhevsky 2014): 61 million parameters",
    "amoebanet_d": "AmoebaNet-D (Real et al. 2018): 82 million with 18 layers and 208 filters",
    "awd_lm": "AWD-LM (Merity et al. 2017): 24 million",
    "bert_large": "BERT-Large, masked language model (Devlin et al. 2018): 335 million",
    "gnmt": "GNMT (Wu et al. 2016): 161 million with 4 layers in encoder and decoder each",
    "gpt_1_3b": "GPT (PipeDream-2BW, Narayanan et al. 2021): 1.3 billion",
    "gpt_2_2b": "GPT (PipeDream-2BW, Narayanan et al. 2021): 2.2 billion",
    "gpt_3_8b": "GPT (PipeDream-2BW, Narayanan et al. 2021): 3.8 billion",
    "inception_v3": "Inception-v3 (Szegedy et al. 2015): 24 million without the auxiliary classifier",
    "llama_7b": "LLaMA-7B (Touvron et al. 2023): 6.7 billion",
    "mamba_1_4b": "Mamba-1.4B (Gu and Dao 2023): 1.4 billion",
    "resnet152": "ResNet-152 (He et al. 2015): 60 million",
    "resnet50": "ResNet-50 (He et al. 2015): 26 million",
    "s2vt": "S2VT (Venugopalan et al. 2015): 87 million",
    "vgg16": "VGG-16 (Simonyan and Zisserman 2015): 138 million",
}


def require_sizes(counts: Mapping[str, int], dropout: float = 0.0) -> None:
    """Raises InvalidInputError for an option of a model that is no count from 1, or no probability below 1."""
    for name, count in counts.items():
        require_count(f"model.{name}", count)
    require_amount("model.dropout", dropout)
    require(dropout < 1, "model.dropout", "must be below 1", dropout)
