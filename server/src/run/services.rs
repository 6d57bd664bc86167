//! The services that run as long as the process: load reports, the gRPC listener and the gRPC health service, the
//! reloading of the replica token, and the trimming of the allocator's memory.

use std::convert::Infallible;

use anyhow::{Context as _, anyhow, bail};
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::replica_server::ReplicaServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::allocator;
use crate::app::App;
use crate::authentication::{RequireToken, follow};
use crate::lifecycle::Phase;
use crate::listen::{GRPC_REQUEST_BYTES_MAX, serve_grpc};
use crate::load::{ReplicaService, publish};

/// Spawns the services that run as long as the process.
pub(super) async fn spawn_services(
    services: &mut JoinSet<anyhow::Result<Infallible>>,
    app: &App,
    grpc: TcpListener,
    token: Option<ReplicaTokenFile>,
) {
    if let Some(token) = token.clone() {
        tracing::info!(
            "API requests and calls to the gRPC service ovfleet.v1alpha1.Replica require a replica token"
        );
        services.spawn(follow(token));
    }
    let (reports, receiver) = watch::channel(proto::v1alpha1::Load::default());
    let (health, health_service) = tonic_health::server::health_reporter();
    // Set the status before the port is served, because a new reporter reports that the service is healthy.
    set_health(&health, app.lifecycle().phase()).await;
    let service = ReplicaService::new(app.clone(), receiver);
    let replica = ReplicaServer::new(service).max_decoding_message_size(GRPC_REQUEST_BYTES_MAX);
    let replica = InterceptedService::new(replica, RequireToken(token));
    let health_service = health_service.max_decoding_message_size(GRPC_REQUEST_BYTES_MAX);
    let grpc_services = Routes::new(health_service).add_service(replica).prepare();
    let publisher = app.clone();
    services.spawn(async move {
        publish(publisher, reports).await;
        bail!("the task that publishes load reports has ended")
    });
    services.spawn(async move { Ok(serve_grpc(grpc, grpc_services).await) });
    services.spawn(allocator::trim_excess());
    let app = app.clone();
    services.spawn(async move {
        let mut phase = app.lifecycle().watch();
        loop {
            let current = *phase.borrow_and_update();
            set_health(&health, current).await;
            phase.changed().await.context("the lifecycle was dropped")?;
        }
    });
}

/// Sets the status of the gRPC health service.
async fn set_health(health: &HealthReporter, phase: Phase) {
    let status = if phase == Phase::Serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in ["", "ovfleet.v1alpha1.Replica"] {
        health.set_service_status(service, status).await;
    }
}

/// Returns the reason why a service has ended.
pub(super) fn service_error(
    ended: Result<anyhow::Result<Infallible>, tokio::task::JoinError>,
) -> anyhow::Error {
    match ended {
        Ok(Ok(never)) => match never {},
        Ok(Err(error)) => error,
        Err(error) => anyhow!(error).context("a service of the server panicked"),
    }
}
