//! vLLM's paths for sleep and wake-up. These paths exist only with `--enable-sleep-mode`, because any client could use
//! them to delay all others.

use axum::extract::{Query, State};
use axum::http::{StatusCode, Uri};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::json;
use server_engine::SleepLevel;

use crate::app::App;
use crate::error::Error;
use crate::sleep::level;

/// Whether the server has vLLM's paths for sleep and wake-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SleepApi {
    /// The paths do not exist.
    Disabled,
    /// The paths exist, as in vLLM's development mode.
    Enabled,
}

pub(super) fn routes(api: SleepApi) -> Router<App> {
    match api {
        SleepApi::Disabled => Router::new(),
        SleepApi::Enabled => Router::new()
            .route("/sleep", post(sleep))
            .route("/wake_up", post(wake_up))
            .route("/is_sleeping", get(is_sleeping)),
    }
}

async fn sleep(State(app): State<App>, uri: Uri) -> Result<StatusCode, Error> {
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(&uri);
    let Query(pairs) = pairs.map_err(|error| Error::invalid("query", error))?;
    let mut sleep_level = SleepLevel::Cache;
    for (name, value) in pairs {
        if name == "level" {
            let known = value.parse().ok().and_then(level);
            sleep_level =
                known.ok_or_else(|| Error::invalid("level", format!("must be 1 or 2, not {value:?}")))?;
        }
    }
    app.served()?.engine.sleep(sleep_level).await?;
    Ok(StatusCode::OK)
}

/// Wakes the whole engine. vLLM's `tags`, which select parts of the engine, are ignored.
async fn wake_up(State(app): State<App>) -> Result<StatusCode, Error> {
    app.served()?.engine.wake().await?;
    Ok(StatusCode::OK)
}

async fn is_sleeping(State(app): State<App>) -> Result<impl IntoResponse, Error> {
    let is_sleeping = app.served()?.engine.sleep_level().is_some();
    Ok(Json(json!({"is_sleeping": is_sleeping})))
}
