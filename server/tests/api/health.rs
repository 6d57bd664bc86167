//! Tests the gRPC health service of the server process.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use proto::v1alpha1::DrainRequest;
use proto::v1alpha1::replica_client::ReplicaClient;
use tonic::Streaming;
use tonic::transport::Channel;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// A server process. Dropping it ends the process.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // The process may have exited already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn next(health: &mut Streaming<HealthCheckResponse>) -> ServingStatus {
    health.message().await.unwrap().unwrap().status()
}

#[tokio::test]
async fn the_health_service_follows_the_replica() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ovfleet-server"));
    command.args(["--backend", "sim", "--port", "0", "--grpc-port", "0"]);
    let mut process = Process(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(process.0.stderr.take().unwrap()).lines();
    let address = lines.find_map(|line| Some(line.unwrap().split_once("gRPC on ")?.1.trim().to_owned()));
    let url = format!("http://{}", address.unwrap());

    let channel = Channel::from_shared(url.clone()).unwrap().connect().await.unwrap();
    let mut client = HealthClient::new(channel);
    for service in ["", "ovfleet.v1alpha1.Replica"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let mut health = client.watch(request).await.unwrap().into_inner();
        while next(&mut health).await != ServingStatus::Serving {}
    }

    let mut replica = ReplicaClient::connect(url).await.unwrap();
    let request = HealthCheckRequest { service: String::new() };
    let mut health = client.watch(request).await.unwrap().into_inner();
    assert_eq!(next(&mut health).await, ServingStatus::Serving);
    let mut progress = replica.drain(DrainRequest {}).await.unwrap().into_inner();
    assert_eq!(progress.message().await.unwrap().unwrap().requests, 0);
    assert_eq!(next(&mut health).await, ServingStatus::NotServing);
}
