//! Leader election: of several operators, only the holder of a Lease reconciles. As in Kubernetes components, clocks
//! of different machines are not compared: a Lease expires when this process has seen it unchanged for its duration.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use rand::RngExt as _;
use tokio::time::timeout;

/// The shortest pause between two attempts to acquire a Lease.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The configuration of leader election.
#[derive(Clone, Debug)]
pub struct Config {
    /// The namespace of the Lease.
    pub namespace: String,
    /// The name of the Lease.
    pub name: String,
    /// The name of this process in the Lease. It must be unique.
    pub identity: String,
    /// The time after which a Lease expires if it is not renewed.
    pub duration: Duration,
}

impl Config {
    /// The interval at which the leader renews the Lease and other operators read it.
    fn retry_interval(&self) -> Duration {
        self.duration / 5
    }

    /// The time after which a leader that cannot renew the Lease stops, well before the Lease expires for other
    /// operators.
    fn renew_deadline(&self) -> Duration {
        self.duration * 2 / 3
    }
}

/// A participant in the leader election.
#[derive(Debug)]
pub struct Election {
    leases: Api<Lease>,
    config: Config,
    /// The last observed content of the Lease, and the time at which this content was first observed.
    observed: Option<(LeaseSpec, Instant)>,
}

impl Election {
    /// Creates a participant that does not hold the Lease yet.
    #[must_use]
    pub fn new(client: &Client, config: Config) -> Self {
        Self { leases: Api::namespaced(client.clone(), &config.namespace), config, observed: None }
    }

    /// Waits until this process holds the Lease.
    ///
    /// # Cancel safety
    /// If the future is dropped, this process may hold the Lease, which then expires after its duration.
    pub async fn acquire(&mut self) {
        loop {
            // Jitter spreads the attempts of several operators.
            let mut pause = self.config.retry_interval().mul_f64(rand::rng().random_range(0.8..1.2));
            match self.try_within(self.config.retry_interval()).await {
                Ok(true) => return,
                // Try again as soon as the Lease expires.
                Ok(false) => pause = pause.min(self.time_to_expiry().max(RETRY_PAUSE)),
                Err(error) => tracing::warn!(error = format!("{error:#}"), "failed to acquire the lease"),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Renews the Lease until it is lost.
    ///
    /// # Errors
    /// The Lease is lost: another process holds it, or it could not be renewed in time.
    pub async fn hold(&mut self) -> anyhow::Result<std::convert::Infallible> {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.config.retry_interval()).await;
            let remaining = self.config.renew_deadline().saturating_sub(renewed.elapsed());
            let started = Instant::now();
            match self.try_within(self.config.retry_interval().min(remaining)).await {
                Ok(true) => renewed = started,
                Ok(false) => bail!("another operator has acquired the lease"),
                Err(error) => tracing::warn!(error = format!("{error:#}"), "failed to renew the lease"),
            }
            if renewed.elapsed() >= self.config.renew_deadline() {
                bail!("failed to renew the lease within {:?}", self.config.renew_deadline());
            }
        }
    }

    /// Releases the Lease, so that another operator can acquire it immediately.
    ///
    /// # Errors
    /// The Lease could not be released; it expires after its duration.
    pub async fn release(&mut self) -> anyhow::Result<()> {
        let Some(mut lease) = self.leases.get_opt(&self.config.name).await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_ref() == Some(&self.config.identity) {
            spec.holder_identity = Some(String::new());
            spec.lease_duration_seconds = Some(1);
            self.leases.replace(&self.config.name, &PostParams::default(), &lease).await?;
        }
        Ok(())
    }

    /// Acquires or renews the Lease if possible. Returns whether this process holds it now. Fails if the API server
    /// does not respond within `limit`; the next attempt then uses another connection.
    async fn try_within(&mut self, limit: Duration) -> anyhow::Result<bool> {
        let attempt = timeout(limit, self.try_acquire_or_renew()).await;
        attempt.with_context(|| {
            format!("the API server did not answer the requests for the lease within {limit:?}")
        })?
    }

    /// Acquires or renews the Lease if possible. Returns whether this process holds it now.
    async fn try_acquire_or_renew(&mut self) -> anyhow::Result<bool> {
        let present = self.leases.get_opt(&self.config.name).await.context("failed to read the lease")?;
        let Some(mut lease) = present else { return self.create().await };
        let spec = lease.spec.clone().unwrap_or_default();
        let holder = spec.holder_identity.clone().unwrap_or_default();
        let is_own = holder == self.config.identity;
        if !is_own && !holder.is_empty() && !self.is_expired(&spec) {
            return Ok(false);
        }
        lease.spec = Some(self.renewed(&spec, is_own));
        match self.leases.replace(&self.config.name, &PostParams::default(), &lease).await {
            Ok(lease) => {
                self.observed = Some((lease.spec.unwrap_or_default(), Instant::now()));
                Ok(true)
            }
            // Another operator acquired the Lease first.
            Err(kube::Error::Api(status)) if status.code == 409 && !is_own => Ok(false),
            // A conflict on this process's own Lease does not mean that it is lost: an earlier request of this process
            // that timed out may have changed it. The next attempt reads the current holder.
            Err(error) => Err(error).context("failed to write the lease"),
        }
    }

    async fn create(&mut self) -> anyhow::Result<bool> {
        let lease = Lease {
            metadata: ObjectMeta { name: Some(self.config.name.clone()), ..ObjectMeta::default() },
            spec: Some(self.renewed(&LeaseSpec::default(), false)),
        };
        match self.leases.create(&PostParams::default(), &lease).await {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error).context("failed to create the lease"),
        }
    }

    /// Whether this process has seen the Lease unchanged for its duration.
    fn is_expired(&mut self, spec: &LeaseSpec) -> bool {
        match &self.observed {
            Some((observed, _)) if observed == spec => self.time_to_expiry().is_zero(),
            _ => {
                self.observed = Some((spec.clone(), Instant::now()));
                false
            }
        }
    }

    /// The time until the Lease expires if it is not renewed.
    fn time_to_expiry(&self) -> Duration {
        let Some((observed, since)) = &self.observed else { return Duration::ZERO };
        let seconds = u64::try_from(observed.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        Duration::from_secs(seconds).saturating_sub(since.elapsed())
    }

    fn renewed(&self, before: &LeaseSpec, is_own: bool) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        // Round up: the Lease must not expire before the leader's renew deadline, which is not rounded to seconds.
        let seconds = self.config.duration.as_millis().div_ceil(1000);
        let transitions = before.lease_transitions.unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.config.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(seconds).unwrap_or(i32::MAX).max(1)),
            acquire_time: before.acquire_time.clone().filter(|_| is_own).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if is_own { transitions } else { transitions + 1 }),
            ..before.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::body::Body;
    use http::{Method, Request, Response, StatusCode};
    use serde_json::json;

    use super::*;

    /// The time within which a test must end.
    const LIMIT: Duration = Duration::from_secs(60);

    fn config(duration: Duration) -> Config {
        Config {
            namespace: "models".to_owned(),
            name: "operator".to_owned(),
            identity: "one".to_owned(),
            duration,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_conflict_does_not_end_the_leader_and_another_holder_does() {
        // The API server rejects the first renewal because of a conflict. The response to the fifth request names
        // another holder.
        let requests = Arc::new(AtomicUsize::new(0));
        let counter = requests.clone();
        let respond = move |request: Request<kube::client::Body>| {
            let number = counter.fetch_add(1, Ordering::Relaxed);
            let holder = if number < 4 { "one" } else { "two" };
            let lease = json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "operator"},
                "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15},
            });
            let conflict = json!({"kind": "Status", "status": "Failure", "reason": "Conflict", "code": 409});
            let (status, body) = match (request.method(), number) {
                (&Method::PUT, 1) => (StatusCode::CONFLICT, conflict),
                _ => (StatusCode::OK, lease),
            };
            async move { Response::builder().status(status).body(Body::from(body.to_string())) }
        };
        let client = Client::new(tower::service_fn(respond), "models");
        let mut election = Election::new(&client, config(Duration::from_secs(15)));
        let ended = timeout(LIMIT, election.hold()).await.expect("the lease is lost");
        assert_eq!(ended.unwrap_err().to_string(), "another operator has acquired the lease");
        // Two attempts to renew the Lease send two requests each. The response to one more request names the other
        // holder.
        assert_eq!(requests.load(Ordering::Relaxed), 5);
    }

    #[tokio::test]
    async fn the_lease_does_not_expire_before_the_leader_stops() {
        let respond = |_: Request<kube::client::Body>| async { Response::builder().body(Body::empty()) };
        let client = Client::new(tower::service_fn(respond), "models");
        for milliseconds in [1000, 1499, 1900, 2500, 15_000] {
            let duration = Duration::from_millis(milliseconds);
            let election = Election::new(&client, config(duration));
            let lease = election.renewed(&LeaseSpec::default(), false);
            let seconds = u64::try_from(lease.lease_duration_seconds.unwrap()).unwrap();
            let expiry = Duration::from_secs(seconds);
            assert!(expiry >= duration && expiry > election.config.renew_deadline(), "{duration:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_is_acquired_after_a_request_that_the_api_server_does_not_answer() {
        let requests = Arc::new(AtomicUsize::new(0));
        let counter = requests.clone();
        let respond = move |request: Request<kube::client::Body>| {
            let number = counter.fetch_add(1, Ordering::Relaxed);
            async move {
                if number == 0 {
                    std::future::pending::<()>().await;
                }
                let lease = json!({
                    "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "operator"},
                });
                let missing =
                    json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
                let (status, body) = match *request.method() {
                    Method::POST => (StatusCode::CREATED, lease),
                    _ => (StatusCode::NOT_FOUND, missing),
                };
                Response::builder().status(status).body(Body::from(body.to_string()))
            }
        };
        let client = Client::new(tower::service_fn(respond), "models");
        let mut election = Election::new(&client, config(Duration::from_secs(15)));
        timeout(LIMIT, election.acquire()).await.expect("the second attempt succeeds");
        // The first request is not answered, the second one reads the Lease, and the third one creates it.
        assert_eq!(requests.load(Ordering::Relaxed), 3);
    }
}
