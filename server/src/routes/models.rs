//! Serves `/models`, the list of served models.

use axum::Json;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use server_openai::{Model, ModelList};

use crate::app::{App, ServedModel};
use crate::error::Error;

/// The header with the ID of the store, for routers that do not receive load reports.
const STORE_ID: &str = "x-ovfleet-store-id";

pub(super) async fn list(State(app): State<App>) -> Result<impl IntoResponse, Error> {
    let served = app.served()?;
    let data = served.model.served_names().map(|name| describe(name, served)).collect();
    let store_id = app.store().id_if_enabled();
    Ok(([(STORE_ID, format!("{store_id:016x}"))], Json(ModelList { object: "list", data })))
}

/// Handles `GET /models/{id}`. The ID may contain slashes.
pub(super) async fn retrieve(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Model>, Error> {
    let served = app.served()?;
    if served.model.has_name(&id) { Ok(Json(describe(&id, served))) } else { Err(Error::UnknownModel(id)) }
}

fn describe(name: &str, served: &ServedModel) -> Model {
    let adapter = served.model.adapter(served.model.adapter_number(name));
    Model {
        id: name.to_owned(),
        object: "model",
        created: served.model.created,
        owned_by: "ovfleet",
        root: adapter.map(|adapter| adapter.path.to_string_lossy().into_owned()),
        parent: adapter.map(|_| served.model.name().to_owned()),
        max_model_len: served.engine.limits().requests.max_model_len,
    }
}
