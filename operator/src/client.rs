//! The client for the API server. It limits the duration of each request, except for the stream of a watch. Without a
//! limit, a request on a connection whose peer has disappeared would fail only after 15 minutes, or never.

use std::time::Duration;

use http::{Request, Response};
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::client::Body;
use tokio::time::timeout;

/// Time within which the API server must respond to a request from the operator, or must begin the stream of a watch.
///
/// If exceeded: the request fails, and the operator retries it later.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a client that sends its requests with `client`, and limits the duration of each request.
pub(crate) fn with_request_timeout(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    Client::new(tower::service_fn(move |request| send_in_time(client.clone(), request)), namespace)
}

async fn send_in_time(client: Client, request: Request<Body>) -> kube::Result<Response<Body>> {
    let outcome = timeout(REQUEST_TIMEOUT, send(client, request)).await;
    outcome.unwrap_or_else(|_| {
        let message = format!("the API server did not respond within {REQUEST_TIMEOUT:?}");
        Err(kube::Error::Service(message.into()))
    })
}

/// Sends a request, and receives the body of the response unless it is the stream of a watch.
async fn send(client: Client, request: Request<Body>) -> kube::Result<Response<Body>> {
    let mut parameters = request.uri().query().unwrap_or_default().split('&');
    let is_watch = parameters.any(|parameter| parameter == "watch=true");
    let response = client.send(request).await?;
    // The stream of a watch needs no time limit: the watcher itself detects a stream that has been silent for too long.
    if is_watch && response.status().is_success() {
        return Ok(response);
    }
    let (head, body) = response.into_parts();
    Ok(Response::from_parts(head, Body::from(body.collect_bytes().await?)))
}

/// The API for the objects of a kind in a namespace, or in all namespaces.
///
/// All objects are received as [`DynamicObject`] and decoded afterwards, for two reasons. An object that cannot be
/// decoded does not end the watch of the other objects. In addition, the code that decodes a type is compiled for only
/// one deserializer, instead of for each deserializer that the events of a watch use.
pub(crate) fn objects_api(
    client: &Client,
    namespace: Option<&str>,
    kind: &ApiResource,
) -> Api<DynamicObject> {
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, kind),
        None => Api::all_with(client.clone(), kind),
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::pending;

    use futures_util::{StreamExt as _, stream};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::ResourceExt as _;
    use kube::api::{Api, WatchEvent, WatchParams};
    use serde_json::json;

    use super::*;

    /// Responds like an API server that does not answer a request for the object `silent`, sends the first event of a
    /// watch only after the time limit of requests, and answers all other requests without ever sending a body.
    async fn respond(request: Request<Body>) -> Result<Response<axum::body::Body>, Infallible> {
        if request.uri().path().ends_with("/silent") {
            pending::<()>().await;
        }
        let is_watch = request.uri().query().is_some_and(|query| query.contains("watch=true"));
        let body = async move {
            if !is_watch {
                pending::<()>().await;
            }
            tokio::time::sleep(2 * REQUEST_TIMEOUT).await;
            let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "late"}});
            Ok::<_, Infallible>(format!("{}\n", json!({"type": "ADDED", "object": object})))
        };
        Ok(Response::new(axum::body::Body::from_stream(stream::once(body))))
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_requests_is_limited_and_that_of_watches_is_not() {
        let client = with_request_timeout(Client::new(tower::service_fn(respond), "models"));
        let maps: Api<ConfigMap> = Api::default_namespaced(client);
        for name in ["silent", "stalled"] {
            let error = maps.get(name).await.unwrap_err().to_string();
            assert!(error.contains("did not respond within 30s"), "{name}: {error}");
        }
        let mut events = maps.watch(&WatchParams::default(), "1").await.unwrap().boxed();
        match events.next().await.unwrap().unwrap() {
            WatchEvent::Added(map) => assert_eq!(map.name_any(), "late"),
            other => panic!("{other:?}"),
        }
    }
}
