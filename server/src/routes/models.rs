//! Which models there are.

use axum::Json;
use axum::extract::{Path, State};
use axum::response::IntoResponse;
use server_openai::{Model, ModelList};

use crate::app::{App, Serving};
use crate::error::Error;

/// The header by which a router that gets no load reports learns which number is in the names of what is kept here.
const KEEPER: &str = "x-ovfleet-keeper";

pub(super) async fn list(State(app): State<App>) -> Result<impl IntoResponse, Error> {
    let serving = app.serving()?;
    let data = serving.model.served_names().map(|name| describe(name, serving)).collect();
    let keeper = if app.store().is_on() { app.store().keeper() } else { 0 };
    Ok(([(KEEPER, format!("{keeper:016x}"))], Json(ModelList { object: "list", data })))
}

/// `id` may have slashes in it.
pub(super) async fn retrieve(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Model>, Error> {
    let serving = app.serving()?;
    if serving.model.has_name(&id) { Ok(Json(describe(&id, serving))) } else { Err(Error::UnknownModel(id)) }
}

fn describe(name: &str, serving: &Serving) -> Model {
    let adapter = serving.model.adapter(serving.model.adapter_number(name));
    Model {
        id: name.to_owned(),
        object: "model",
        created: serving.model.created,
        owned_by: "ovfleet",
        root: adapter.map(|adapter| adapter.path.to_string_lossy().into_owned()),
        parent: adapter.map(|_| serving.model.name().to_owned()),
        max_model_len: serving.engine.limits().requests.max_model_len,
    }
}
