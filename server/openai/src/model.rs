//! The list of models.

use serde::Serialize;

/// The list of the models that a server serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelList {
    /// The object type: always `list`.
    pub object: &'static str,
    /// The models that the server serves.
    pub data: Vec<Model>,
}

/// A model that requests can name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Model {
    /// The name that requests use.
    pub id: String,
    /// The object type: always `model`.
    pub object: &'static str,
    /// The time when the model was loaded, in seconds since 1970.
    pub created: u64,
    /// The owner of the model.
    pub owned_by: &'static str,
    /// The path of the files of an adapter; absent for base models. (Like `parent`, an extension of OpenAI's API with
    /// vLLM's name.)
    #[serde(skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// The base model of an adapter; absent for base models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The largest number of tokens of a prompt and its response together. (An extension of OpenAI's API with the name
    /// that other servers use.)
    pub max_model_len: u32,
}
