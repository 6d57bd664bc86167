//! Who acts, where several operators run: the holder of a Lease. Times of other machines' clocks are not compared; what
//! counts is for how long this process has seen the Lease unchanged, as in Kubernetes' own components.

use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Client;
use kube::api::{Api, ObjectMeta, PostParams};
use rand::RngExt as _;

/// The shortest pause between two attempts to acquire a Lease.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// How a Lease is held.
#[derive(Clone, Debug)]
pub struct Config {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Who this is. No two processes may be the same.
    pub identity: String,
    /// Time after which a Lease that is not renewed is free.
    pub duration: Duration,
}

impl Config {
    /// How often it is renewed, and looked at by those who do not hold it.
    fn interval(&self) -> Duration {
        self.duration / 5
    }

    /// Time after which a holder that could not renew it stops: well before others may begin.
    fn limit(&self) -> Duration {
        self.duration * 2 / 3
    }
}

/// Somebody who wants to act.
#[derive(Debug)]
pub struct Election {
    leases: Api<Lease>,
    config: Config,
    /// The Lease as it was seen last, and since when it has been like that.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    /// For the Lease of `config`.
    #[must_use]
    pub fn new(client: &Client, config: Config) -> Self {
        Self { leases: Api::namespaced(client.clone(), &config.namespace), config, seen: None }
    }

    /// Waits until this process holds the Lease.
    ///
    /// # Cancel safety
    /// If it is dropped, the Lease may have been taken; it is free again after its duration.
    pub async fn acquire(&mut self) {
        loop {
            // Not all at once.
            let mut pause = self.config.interval().mul_f64(rand::rng().random_range(0.8..1.2));
            match self.attempt().await {
                Ok(true) => return,
                // Not an interval after it expires, but then.
                Ok(false) => pause = pause.min(self.time_to_expiry().max(RETRY_PAUSE)),
                Err(error) => tracing::warn!(error = format!("{error:#}"), "failed to look at the lease"),
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Renews the Lease for as long as that goes well.
    ///
    /// # Errors
    /// It is lost: somebody else has it, or it could not be renewed in time.
    pub async fn hold(&mut self) -> anyhow::Result<std::convert::Infallible> {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(self.config.interval()).await;
            let left = self.config.limit().saturating_sub(renewed.elapsed());
            let begun = Instant::now();
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(true)) => renewed = begun,
                Ok(Ok(false)) => bail!("somebody else has taken the lease"),
                Ok(Err(error)) => tracing::warn!(error = format!("{error:#}"), "failed to renew the lease"),
                Err(_) => {}
            }
            if renewed.elapsed() >= self.config.limit() {
                bail!("the lease could not be renewed in time");
            }
        }
    }

    /// Gives the Lease up, so that others need not wait.
    ///
    /// # Errors
    /// It could not be given up; it is free after its duration.
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

    /// Takes or renews the Lease; whether this process holds it now.
    async fn attempt(&mut self) -> anyhow::Result<bool> {
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
                self.seen = Some((lease.spec.unwrap_or_default(), Instant::now()));
                Ok(true)
            }
            // Somebody was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
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

    /// Whether nobody has renewed it for as long as it is good for, as seen from here.
    fn is_expired(&mut self, spec: &LeaseSpec) -> bool {
        match &self.seen {
            Some((seen, _)) if seen == spec => self.time_to_expiry().is_zero(),
            _ => {
                self.seen = Some((spec.clone(), Instant::now()));
                false
            }
        }
    }

    /// The time until the Lease as it was last seen expires, if nobody renews it.
    fn time_to_expiry(&self) -> Duration {
        let Some((seen, since)) = &self.seen else { return Duration::ZERO };
        let seconds = u64::try_from(seen.lease_duration_seconds.unwrap_or(0)).unwrap_or(0);
        Duration::from_secs(seconds).saturating_sub(since.elapsed())
    }

    fn renewed(&self, before: &LeaseSpec, is_own: bool) -> LeaseSpec {
        let now = MicroTime(Timestamp::now());
        let transitions = before.lease_transitions.unwrap_or(0);
        LeaseSpec {
            holder_identity: Some(self.config.identity.clone()),
            lease_duration_seconds: Some(
                i32::try_from(self.config.duration.as_secs()).unwrap_or(i32::MAX).max(1),
            ),
            acquire_time: before.acquire_time.clone().filter(|_| is_own).or(Some(now.clone())),
            renew_time: Some(now),
            lease_transitions: Some(if is_own { transitions } else { transitions + 1 }),
            ..before.clone()
        }
    }
}
