//! What the list of models looks like.

use serde::Serialize;

/// The models a server serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<Model>,
}

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// The name that requests give.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Whose it is.
    pub owned_by: &'static str,
    /// Of an adapter, where its files are. (An extension, named as vLLM names it; so is the next.)
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// Of an adapter, the model that it changes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Most tokens of prompt and answer together. (An extension, named as others name it.)
    pub max_model_len: u32,
}
