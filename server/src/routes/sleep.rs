//! Sleep and waking by hand, as vLLM has them. They are there only if the server was told so: whoever can ask for an
//! answer could else make all others wait for theirs.

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

/// Whether requests may put the server to sleep and wake it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sleep {
    /// Nothing is there to ask for it.
    ByItself,
    /// As vLLM has it in its mode for development.
    OnRequest,
}

pub(super) fn routes(who: Sleep) -> Router<App> {
    match who {
        Sleep::ByItself => Router::new(),
        Sleep::OnRequest => Router::new()
            .route("/sleep", post(sleep))
            .route("/wake_up", post(wake_up))
            .route("/is_sleeping", get(is_sleeping)),
    }
}

async fn sleep(State(app): State<App>, uri: Uri) -> Result<StatusCode, Error> {
    let pairs = Query::<Vec<(String, String)>>::try_from_uri(&uri);
    let Query(pairs) = pairs.map_err(|error| Error::invalid("query", error))?;
    let mut wanted = SleepLevel::Cache;
    for (name, value) in pairs {
        if name == "level" {
            let known = value.parse().ok().and_then(level);
            wanted = known.ok_or_else(|| Error::invalid("level", format!("{value:?} is neither 1 nor 2")))?;
        }
    }
    app.serving()?.engine.sleep(wanted).await?;
    Ok(StatusCode::OK)
}

/// All of it: parts, as vLLM's `tags` name them, are not woken one by one.
async fn wake_up(State(app): State<App>) -> Result<StatusCode, Error> {
    app.serving()?.engine.wake().await?;
    Ok(StatusCode::OK)
}

async fn is_sleeping(State(app): State<App>) -> Result<impl IntoResponse, Error> {
    let is_sleeping = app.serving()?.engine.sleep_level().is_some();
    Ok(Json(json!({"is_sleeping": is_sleeping})))
}
