//! Tests the watch of EndpointSlices with a simulated API server that lists the slices and then sends changes.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use futures_util::StreamExt as _;
use router::discovery::{DiscoveredReplica, PortNames, ServiceName, slices};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;

/// The query parameters of a list or watch request.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListOptions {
    watch: Option<String>,
    label_selector: Option<String>,
}

/// The state of the API server: the list, and the events of each watch.
#[derive(Default)]
struct Cluster {
    slices: Vec<Value>,
    watches: Vec<mpsc::Receiver<Value>>,
    refuses: u32,
}

fn slice(name: &str, addresses: &[(&str, Value)]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|(address, conditions)| json!({"addresses": [address], "conditions": conditions}))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "models", "resourceVersion": "2"},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8000}, {"name": "grpc", "port": 50051}],
        "endpoints": endpoints,
    })
}

async fn endpoint_slices(
    State(cluster): State<Arc<Mutex<Cluster>>>,
    Query(options): Query<ListOptions>,
) -> Response {
    assert_eq!(options.label_selector.as_deref(), Some("kubernetes.io/service-name=chat"));
    let mut cluster = cluster.lock().unwrap();
    if cluster.refuses > 0 {
        cluster.refuses -= 1;
        return StatusCode::INTERNAL_SERVER_ERROR.into_response();
    }
    if options.watch.is_none() {
        let list = json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": "1"},
            "items": cluster.slices,
        });
        return axum::Json(list).into_response();
    }
    let events = cluster.watches.pop().expect("the test provides enough watches");
    let lines = ReceiverStream::new(events).map(|event| Ok::<_, std::io::Error>(format!("{event}\n")));
    Body::from_stream(lines).into_response()
}

fn addresses(replicas: &[DiscoveredReplica]) -> Vec<String> {
    replicas.iter().map(|replica| format!("{}/{}", replica.http, replica.grpc.unwrap().port())).collect()
}

#[tokio::test]
async fn replicas_follow_the_slices_of_a_service_when_a_watch_expires() {
    let ready = || json!({"ready": true});
    let (events, first_watch) = mpsc::channel(4);
    let (later_events, second_watch) = mpsc::channel(4);
    let cluster = Arc::new(Mutex::new(Cluster {
        slices: vec![slice("chat-1", &[("10.0.0.1", ready()), ("10.0.0.2", json!({"ready": false}))])],
        watches: vec![second_watch, first_watch],
        refuses: 1,
    }));
    let path = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices";
    let api = Router::new().route(path, get(endpoint_slices)).with_state(Arc::clone(&cluster));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { axum::serve(listener, api).await.unwrap() });

    let client = kube::Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap();
    let (sender, mut changes) = mpsc::channel(4);
    tasks.spawn(async move {
        let service: ServiceName = "models/chat".parse().unwrap();
        let ports = PortNames { http: "http".to_owned(), grpc: "grpc".to_owned() };
        let on_change = |replicas: Vec<DiscoveredReplica>| {
            let sender = sender.clone();
            async move { sender.send(replicas).await.unwrap() }
        };
        slices::follow(client, &service, &ports, on_change).await;
    });
    // The first answer was an error, which does not change the list of replicas.
    assert_eq!(addresses(&changes.recv().await.unwrap()), ["10.0.0.1:8000/50051"]);

    let modified = |object: Value| json!({"type": "MODIFIED", "object": object});
    let both = slice("chat-1", &[("10.0.0.1", ready()), ("10.0.0.2", ready())]);
    events.send(modified(both)).await.unwrap();
    assert_eq!(addresses(&changes.recv().await.unwrap()), ["10.0.0.1:8000/50051", "10.0.0.2:8000/50051"]);
    let ending = json!({"ready": true, "serving": true, "terminating": true});
    let one_ends = slice("chat-1", &[("10.0.0.1", ending), ("10.0.0.2", ready())]);
    events.send(modified(one_ends.clone())).await.unwrap();
    assert_eq!(addresses(&changes.recv().await.unwrap()), ["10.0.0.2:8000/50051"]);
    events.send(json!({"type": "ADDED", "object": slice("chat-2", &[("10.0.0.3", ready())])})).await.unwrap();
    assert_eq!(addresses(&changes.recv().await.unwrap()), ["10.0.0.2:8000/50051", "10.0.0.3:8000/50051"]);

    // The watch expires, so all slices are listed again.
    cluster.lock().unwrap().slices = vec![slice("chat-2", &[("10.0.0.3", ready())])];
    let gone = json!({"type": "ERROR", "object": {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 410, "reason": "Expired",
        "message": "too old resource version",
    }});
    events.send(gone).await.unwrap();
    drop(events);
    assert_eq!(addresses(&changes.recv().await.unwrap()), ["10.0.0.3:8000/50051"]);
    let deleted = json!({"type": "DELETED", "object": slice("chat-2", &[("10.0.0.3", ready())])});
    later_events.send(deleted).await.unwrap();
    assert_eq!(changes.recv().await.unwrap(), []);
}
