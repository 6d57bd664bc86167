//! `ovfleet-server drain`: marks a running server as not ready and waits until it has finished its requests. The
//! `preStop` hook of a replica's pod runs this command.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::DrainRequest;
use proto::v1alpha1::replica_client::ReplicaClient;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Mark a running server as not ready and wait until it has finished its requests.
#[derive(Clone, Debug, ClapArgs)]
pub struct DrainArgs {
    /// The address of the server's gRPC services, as given by the server's `--host`.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub host: IpAddr,

    /// The port of the server's gRPC services.
    #[arg(long, env = "OVFLEET_GRPC_PORT", default_value_t = 50051)]
    pub grpc_port: u16,

    /// The file with the replica token, if the server requires one.
    #[arg(long, env = "OVFLEET_REPLICA_TOKEN_FILE", value_name = "PATH")]
    pub replica_token_file: Option<PathBuf>,

    /// Maximum time that `ovfleet-server drain` waits for requests to finish.
    ///
    /// If exceeded: the command exits with code 0 although requests are still running; if the server has not accepted
    /// the drain request by then, the command fails.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = process::units::duration)]
    pub timeout: Duration,

    /// Minimum time between the start of the command and its exit. During this time, routers can detect that the server
    /// is not ready. A value above --timeout has the same effect as --timeout.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = process::units::duration)]
    pub settle: Duration,
}

impl DrainArgs {
    /// Drains the server. It is not an error if requests are still running when the time is up: the container is then
    /// stopped, and the server aborts these requests.
    ///
    /// # Errors
    /// The file with the replica token cannot be read, the server does not accept the request in time or rejects the
    /// token, or the connection to the server breaks while its requests finish.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let start = Instant::now();
        let end = start + self.timeout;
        let address = SocketAddr::new(self.host, self.grpc_port);
        let mut request = tonic::Request::new(DrainRequest {});
        if let Some(path) = &self.replica_token_file {
            ReplicaTokenFile::open(path)?.tokens().add_to(request.metadata_mut().as_mut());
        }
        let accepted = timeout_at(end, async {
            let mut client = ReplicaClient::connect(format!("http://{address}"))
                .await
                .with_context(|| format!("failed to reach {address}"))?;
            let progress = client.drain(request).await.context("failed to drain the server")?;
            anyhow::Ok(progress.into_inner())
        });
        let mut progress = accepted
            .await
            .with_context(|| format!("{address} did not answer within {:?}", self.timeout))??;
        let finished = timeout_at(end, async {
            while progress.message().await.context("failed to receive the progress of draining")?.is_some() {}
            anyhow::Ok(())
        });
        if let Ok(finished) = finished.await {
            finished?;
        }
        sleep_until((start + self.settle).min(end)).await;
        Ok(())
    }
}
