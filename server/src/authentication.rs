//! Checks the replica token. With `--replica-token-file`, the server accepts HTTP and gRPC requests only if they
//! contain a valid replica token. Clients of the router do not know the token, so the server can trust headers such as
//! the one with the tenant. The admin port and the gRPC health service need no token.

use std::convert::Infallible;
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use process::error::chain;
use proto::replica_token::{HEADER, ReplicaTokenFile};
use tonic::Status;
use tonic::service::Interceptor;

use crate::app::App;
use crate::error::Error;

/// The interval at which the token file is reloaded.
const RELOAD_INTERVAL: Duration = Duration::from_millis(500);

/// Returns `api`, restricted to requests with one of the tokens in `file`.
pub fn authenticated(api: Router, file: ReplicaTokenFile, app: App) -> Router {
    api.layer(middleware::from_fn_with_state((file, app), require_token))
}

async fn require_token(
    State((file, app)): State<(ReplicaTokenFile, App)>,
    mut request: Request,
    next: Next,
) -> Response {
    if !file.tokens().are_in(request.headers()) {
        let error = Error::Unauthenticated;
        app.metrics().count("other", error.label(), error.status());
        return error.into_response();
    }
    request.headers_mut().remove(HEADER);
    next.run(request).await
}

/// Accepts only gRPC calls with one of the tokens in the file. Without a file, every call is accepted.
#[derive(Clone, Debug)]
pub struct RequireToken(pub Option<ReplicaTokenFile>);

impl Interceptor for RequireToken {
    fn call(&mut self, call: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        match &self.0 {
            Some(file) if !file.tokens().are_in(call.metadata().as_ref()) => {
                Err(Status::unauthenticated(Error::Unauthenticated.message()))
            }
            _ => Ok(call),
        }
    }
}

/// Periodically reloads the file, so that tokens can be replaced while the server runs. Never returns.
pub(crate) async fn follow(file: ReplicaTokenFile) -> anyhow::Result<Infallible> {
    loop {
        tokio::time::sleep(RELOAD_INTERVAL).await;
        let reread = file.clone();
        let reloaded = tokio::task::spawn_blocking(move || reread.reload());
        match reloaded.await.context("reading the replica tokens panicked")? {
            Ok(Some(tokens)) => tracing::info!(tokens, "the replica tokens have changed"),
            Ok(None) => {}
            Err(error) => tracing::error!(
                error = chain(&error),
                "failed to reload the replica tokens: the previous tokens remain in effect"
            ),
        }
    }
}
