//! Tests of the watches with a simulated API server.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::http::Uri;
use axum::response::{IntoResponse as _, Response};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::*;

/// The maximum time to wait for a watch. It suffices even on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// The ConfigMap `name` of the LLMDeployment `chat`.
fn config_map(name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": "models",
            "resourceVersion": "1",
            "ownerReferences": [{
                "apiVersion": "ovfleet.dev/v1alpha1",
                "kind": "LLMDeployment",
                "name": "chat",
                "uid": "7",
                "controller": true,
            }],
        },
    })
}

/// Starts an API server that lists `count` ConfigMaps and nothing else. Once `changes` is notified, the server reports
/// another ConfigMap. Returns a client for the server.
async fn api_server(count: usize, changes: &Arc<Notify>, tasks: &mut JoinSet<anyhow::Result<()>>) -> Client {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let changes = changes.clone();
    let respond = move |uri: Uri| {
        let response = response(&uri, count, changes.clone());
        async { response }
    };
    tasks.spawn(async move { Ok(axum::serve(listener, axum::Router::new().fallback(respond)).await?) });
    let uri = format!("http://{address}").parse().unwrap();
    Client::try_from(kube::Config::new(uri)).unwrap()
}

fn response(uri: &Uri, count: usize, changes: Arc<Notify>) -> Response {
    let has_objects = uri.path().ends_with("/configmaps");
    let is_watch = uri.query().is_some_and(|query| query.contains("watch=true"));
    if is_watch {
        let changed = async move {
            changes.notified().await;
            let event = json!({"type": "ADDED", "object": config_map("late")});
            Ok::<_, Infallible>(Bytes::from(format!("{event}\n")))
        };
        let events = stream::once(changed).chain(stream::pending());
        let body = if has_objects {
            Body::from_stream(events)
        } else {
            Body::from_stream(stream::pending::<Result<Bytes, Infallible>>())
        };
        return body.into_response();
    }
    let names = (0..count).filter(|_| has_objects).map(|number| format!("map-{number}"));
    let items: Vec<Value> = names.map(|name| config_map(&name)).collect();
    let list =
        json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": "1"}, "items": items});
    list.to_string().into_response()
}

#[tokio::test]
async fn more_objects_than_the_channel_holds_are_listed_and_later_changes_are_sent() {
    let mut tasks = JoinSet::new();
    let changes = Arc::new(Notify::new());
    let client = api_server(2 * CHANGES_MAX, &changes, &mut tasks).await;
    let stores = Arc::new(Stores::new(false));
    let scope = WatchScope {
        client: &client,
        namespace: None,
        stores: &stores,
        metrics: &Metrics::default(),
        discovery_interval: LIMIT,
    };
    let mut watches = Watches::start(scope, &mut tasks);
    timeout(LIMIT, watches.ready()).await.expect("all watches list the existing objects");
    assert_eq!(stores.owned("7").len(), 2 * CHANGES_MAX);

    changes.notify_one();
    let is_sent = async {
        while !stores.owned("7").contains_key(&(Kind::ConfigMap, "late".to_owned())) {
            watches.changes.recv().await.expect("the watches run");
        }
    };
    timeout(LIMIT, is_sent).await.expect("the change is sent");
}

#[test]
fn a_pod_that_cannot_be_decoded_is_ignored() {
    let pod = |containers: Value| {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": {"containers": containers}});
        decode_built_in::<Pod>(serde_json::from_value(pod).unwrap())
    };
    assert!(pod(json!([])).is_some());
    assert!(pod(json!(7)).is_none());
}
