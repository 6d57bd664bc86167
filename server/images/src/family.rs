//! The supported families of vision-language models.

use std::fmt;

/// A family of vision-language models. The family determines the image processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelFamily {
    /// The model type is `qwen2_vl`.
    Qwen2Vl,
    /// The model type is `qwen2_5_vl`.
    Qwen2_5Vl,
    /// The model type is `qwen3_vl`.
    Qwen3Vl,
    /// The model type is `gemma3`.
    Gemma3,
    /// The model type is `llava`.
    Llava,
    /// The model type is `llava_next`.
    LlavaNext,
    /// The model type is `internvl_chat`.
    InternVl,
    /// The model type is `idefics3`.
    Idefics3,
    /// The model type is `smolvlm`. Its processor is that of Idefics3 with other defaults.
    SmolVlm,
    /// The model type is `minicpmv`.
    MiniCpmV,
    /// The model type is `phi4_multimodal` or `phi4mm`.
    Phi4Multimodal,
}

impl ModelFamily {
    /// All families, in the order of the documentation.
    pub const ALL: [Self; 11] = [
        Self::Qwen2Vl,
        Self::Qwen2_5Vl,
        Self::Qwen3Vl,
        Self::Gemma3,
        Self::Llava,
        Self::LlavaNext,
        Self::InternVl,
        Self::Idefics3,
        Self::SmolVlm,
        Self::MiniCpmV,
        Self::Phi4Multimodal,
    ];

    /// The family of models with this `model_type` in their `config.json`.
    #[must_use]
    pub fn from_model_type(model_type: &str) -> Option<Self> {
        if model_type == "phi4mm" {
            return Some(Self::Phi4Multimodal);
        }
        Self::ALL.into_iter().find(|family| family.model_type() == model_type)
    }

    /// The `model_type` in the `config.json` of the family's models. For Phi-4-multimodal, this is `phi4_multimodal`,
    /// although `phi4mm` is also supported.
    #[must_use]
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Qwen2Vl => "qwen2_vl",
            Self::Qwen2_5Vl => "qwen2_5_vl",
            Self::Qwen3Vl => "qwen3_vl",
            Self::Gemma3 => "gemma3",
            Self::Llava => "llava",
            Self::LlavaNext => "llava_next",
            Self::InternVl => "internvl_chat",
            Self::Idefics3 => "idefics3",
            Self::SmolVlm => "smolvlm",
            Self::MiniCpmV => "minicpmv",
            Self::Phi4Multimodal => "phi4_multimodal",
        }
    }
}

impl fmt::Display for ModelFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}

/// The level of detail of an image in a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Detail {
    /// The image takes few tokens: only its global view for families with tiles, and at most about
    /// [`LOW_DETAIL_PIXELS_MAX`](crate::limits::LOW_DETAIL_PIXELS_MAX) pixels for families with a pixel budget.
    Low,
    /// The image takes as many tokens as the image processor of the model assigns to it by default.
    High,
    /// The server decides. It uses the same detail as for [`High`](Self::High).
    #[default]
    Auto,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_recognized_by_its_model_type() {
        for family in ModelFamily::ALL {
            assert_eq!(ModelFamily::from_model_type(family.model_type()), Some(family));
        }
        assert_eq!(ModelFamily::from_model_type("phi4mm"), Some(ModelFamily::Phi4Multimodal));
        assert_eq!(ModelFamily::from_model_type("llama"), None);
    }
}
