//! `server drain`: tells a running server that no more requests will be sent, and waits until it has finished those it
//! has. What a container runs before it is asked to end.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args as ClapArgs;
use proto::replica_token::ReplicaTokenFile;
use proto::v1alpha1::DrainRequest;
use proto::v1alpha1::replica_client::ReplicaClient;
use tokio::time::{Instant, sleep_until, timeout_at};

/// Tell a running server that no more requests will be sent, and wait until it has finished those it has.
#[derive(Clone, Debug, ClapArgs)]
pub struct DrainArgs {
    /// The port of its gRPC services, on this machine.
    #[arg(long, env = "OVFLEET_GRPC_PORT", default_value_t = 50051)]
    pub grpc_port: u16,

    /// The file with the replica token, if the server has one.
    #[arg(long, env = "OVFLEET_REPLICA_TOKEN_FILE", value_name = "PATH")]
    pub replica_token_file: Option<PathBuf>,

    /// Time that `server drain` waits for requests to finish.
    ///
    /// Beyond it: the command exits with code 0 although requests are still running.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = crate::args::duration)]
    pub timeout: Duration,

    /// Shortest time to wait: in which whoever sends requests hears that none should be sent.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = crate::args::duration)]
    pub settle: Duration,
}

impl DrainArgs {
    /// Drains. That time is up is no error: the server is then asked to end, and cuts off what is left.
    ///
    /// # Errors
    /// The server cannot be reached, or rejects the replica token.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let begun = Instant::now();
        let end = begun + self.timeout;
        let address = format!("http://127.0.0.1:{}", self.grpc_port);
        let mut request = tonic::Request::new(DrainRequest {});
        if let Some(path) = &self.replica_token_file {
            ReplicaTokenFile::open(path)?.tokens().add_to(request.metadata_mut().as_mut());
        }
        let drained = timeout_at(end, async {
            let mut client = ReplicaClient::connect(address.clone())
                .await
                .with_context(|| format!("failed to reach {address}"))?;
            let mut told = client.drain(request).await.context("failed to drain")?.into_inner();
            while told.message().await.context("failed to hear how far it is")?.is_some() {}
            anyhow::Ok(())
        });
        if let Ok(drained) = drained.await {
            drained?;
        }
        sleep_until((begun + self.settle).min(end)).await;
        Ok(())
    }
}
