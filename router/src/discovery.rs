//! Which replicas there are: given by address, found in DNS, or told by Kubernetes. Each source says the whole
//! of what it knows whenever that changes; what is done with replicas is not for here.
//!
//! ```text
//! fixed ─┐
//! DNS ───┼─► Discovery::run (the union) ─► watch ─► Replicas
//! slices ┘
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, JoinSet};

mod names;
mod replica;
pub mod slices;

pub use names::{DnsName, FixedReplica, ServiceName};
pub use replica::{DiscoveredReplica, Pod};

/// Reports of sources that wait to be put together.
const REPORTS_MAX: usize = 16;

/// What to look for, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// Given by address.
    pub fixed: Vec<FixedReplica>,
    /// In DNS.
    pub dns: Vec<DnsName>,
    /// In Kubernetes.
    pub services: Vec<ServiceName>,
    /// How often to look in DNS.
    pub dns_interval: Duration,
    /// The names of the Services' ports of HTTP and of gRPC.
    pub port_names: [String; 2],
}

/// One source, with all that it needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Fixed(FixedReplica, Duration),
    Dns(DnsName, Duration),
    Service(ServiceName, [String; 2]),
}

impl Sources {
    fn all(&self) -> impl Iterator<Item = Source> {
        let interval = self.dns_interval;
        let fixed = self.fixed.iter().map(move |replica| Source::Fixed(replica.clone(), interval));
        let dns = self.dns.iter().map(move |name| Source::Dns(name.clone(), interval));
        let ports = self.port_names.clone();
        let services =
            self.services.iter().map(move |service| Source::Service(service.clone(), ports.clone()));
        fixed.chain(dns).chain(services)
    }
}

/// Looks for replicas as `sources` says, and tells `found` whenever they change. Sources that stay when
/// `sources` changes go on undisturbed.
///
/// # Cancel safety
/// Dropping it ends all it has begun.
pub async fn run(mut sources: watch::Receiver<Sources>, found: watch::Sender<Vec<DiscoveredReplica>>) {
    let (reports, mut inbox) = mpsc::channel(REPORTS_MAX);
    let mut tasks = JoinSet::new();
    let mut running: BTreeMap<Source, (AbortHandle, Vec<DiscoveredReplica>)> = BTreeMap::new();
    loop {
        let wanted: Vec<Source> = sources.borrow_and_update().all().collect();
        running.retain(|source, (task, _)| {
            let stays = wanted.contains(source);
            if !stays {
                task.abort();
            }
            stays
        });
        for source in wanted {
            running.entry(source.clone()).or_insert_with(|| {
                let reports = reports.clone();
                (tasks.spawn(async move { follow(source, reports).await }), Vec::new())
            });
        }
        publish(&running, &found);
        loop {
            tokio::select! {
                changed = sources.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                Some((source, replicas)) = inbox.recv() => {
                    if let Some((_, known)) = running.get_mut(&source) {
                        *known = replicas;
                        publish(&running, &found);
                    }
                }
                // Sources that were given up.
                Some(_) = tasks.join_next() => {}
            }
        }
    }
}

fn publish(
    running: &BTreeMap<Source, (AbortHandle, Vec<DiscoveredReplica>)>,
    found: &watch::Sender<Vec<DiscoveredReplica>>,
) {
    let mut union: Vec<DiscoveredReplica> =
        running.values().flat_map(|(_, replicas)| replicas.clone()).collect();
    union.sort();
    // An address that is found twice is one replica.
    union.dedup_by_key(|replica| replica.http);
    found.send_if_modified(|present| {
        let differs = *present != union;
        if differs {
            *present = union;
        }
        differs
    });
}

/// Reports of a source, for as long as it is polled.
type Reports = mpsc::Sender<(Source, Vec<DiscoveredReplica>)>;

async fn follow(source: Source, reports: Reports) {
    let tell = |replicas: Vec<DiscoveredReplica>| {
        let report = (source.clone(), replicas);
        let reports = reports.clone();
        async move {
            let _ = reports.send(report).await;
        }
    };
    match &source {
        Source::Fixed(FixedReplica { host, port, grpc_port }, interval) => {
            let replica = |address: IpAddr| DiscoveredReplica {
                http: SocketAddr::new(address, *port),
                grpc: grpc_port.map(|port| SocketAddr::new(address, port)),
                name: names::with_port(host, *port),
                pod: None,
            };
            if let Ok(address) = IpAddr::from_str(host) {
                return tell(vec![replica(address)]).await;
            }
            // A name for one machine: whichever of its addresses comes first.
            let first = |addresses: Vec<IpAddr>| tell(addresses.into_iter().take(1).map(replica).collect());
            resolve(host, *interval, || look_up(host), first).await;
        }
        Source::Dns(DnsName(FixedReplica { host, port, grpc_port }), interval) => {
            let all = |addresses: Vec<IpAddr>| {
                let replica = |address| DiscoveredReplica {
                    http: SocketAddr::new(address, *port),
                    grpc: grpc_port.map(|port| SocketAddr::new(address, port)),
                    name: SocketAddr::new(address, *port).to_string(),
                    pod: None,
                };
                tell(addresses.into_iter().map(replica).collect())
            };
            resolve(host, *interval, || look_up(host), all).await;
        }
        Source::Service(service, ports) => {
            slices::watch(service, ports, tell).await;
        }
    }
}

async fn look_up(host: &str) -> io::Result<Vec<IpAddr>> {
    let addresses = tokio::net::lookup_host((host, 0)).await?;
    Ok(addresses.map(|address| address.ip()).collect())
}

/// Looks `host` up again and again, and tells its addresses when they change. A look-up that fails changes nothing: that
/// DNS is away does not mean that the replicas are.
async fn resolve<L, T>(
    host: &str,
    interval: Duration,
    look_up: impl Fn() -> L,
    tell: impl Fn(Vec<IpAddr>) -> T,
) where
    L: Future<Output = io::Result<Vec<IpAddr>>>,
    T: Future<Output = ()>,
{
    let mut known: Option<Vec<IpAddr>> = None;
    loop {
        match look_up().await {
            Ok(mut addresses) => {
                addresses.sort();
                addresses.dedup();
                if known.as_ref() != Some(&addresses) {
                    tracing::info!(host, ?addresses, "looked up");
                    known = Some(addresses.clone());
                    tell(addresses).await;
                }
            }
            Err(error) => tracing::warn!(host, %error, "failed to look up replicas"),
        }
        tokio::time::sleep(interval).await;
    }
}

impl fmt::Display for Source {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(replica, _) => write!(formatter, "{replica}"),
            Self::Dns(name, _) => write!(formatter, "{name}"),
            Self::Service(service, _) => write!(formatter, "{service}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Mutex;

    use super::*;

    fn sources(fixed: &[&str]) -> Sources {
        Sources {
            fixed: fixed.iter().map(|replica| replica.parse().unwrap()).collect(),
            dns: Vec::new(),
            services: Vec::new(),
            dns_interval: Duration::from_secs(3600),
            port_names: ["http".to_owned(), "grpc".to_owned()],
        }
    }

    #[tokio::test]
    async fn tells_the_union_and_follows_when_what_is_looked_for_changes() {
        let (wanted, receiver) =
            watch::channel(sources(&["127.0.0.1:2/3", "127.0.0.1:1", "127.0.0.1:2/3", "localhost:9"]));
        let (sender, mut found) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(run(receiver, sender));
        let names = found.wait_for(|found| found.len() == 3).await.unwrap().clone();
        let names: Vec<_> = names.into_iter().map(|found| found.name).collect();
        assert!(names.contains(&"localhost:9".to_owned()) && names.contains(&"127.0.0.1:2".to_owned()));
        wanted.send(sources(&["127.0.0.1:1"])).unwrap();
        let left = found.wait_for(|found| found.len() == 1).await.unwrap().clone();
        assert_eq!(left[0].http.port(), 1);
        let dns = vec!["localhost:7/8".parse().unwrap()];
        wanted.send(Sources { dns, ..sources(&[]) }).unwrap();
        let every = |found: &Vec<DiscoveredReplica>| {
            !found.is_empty() && found.iter().all(|found| found.http.port() == 7)
        };
        let all = found.wait_for(every).await.unwrap().clone();
        assert!(
            all.iter().all(|found| found.http.ip().is_loopback() && found.grpc.unwrap().port() == 8),
            "{all:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_of_a_name_are_told_when_they_change_and_stay_while_it_cannot_be_looked_up() {
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let answers = Mutex::new(VecDeque::from([
            Err(io::ErrorKind::NotFound),
            Ok(vec![address(2), address(1), address(2)]),
            Ok(vec![address(1), address(2)]),
            Err(io::ErrorKind::TimedOut),
            Ok(vec![address(3)]),
            Ok(Vec::new()),
        ]));
        let look_up = || {
            let next = answers.lock().unwrap().pop_front();
            async move {
                match next {
                    Some(answer) => answer.map_err(io::Error::from),
                    None => std::future::pending().await,
                }
            }
        };
        let told = Mutex::new(Vec::new());
        let tell = |addresses| {
            told.lock().unwrap().push(addresses);
            std::future::ready(())
        };
        let interval = Duration::from_secs(5);
        let ended = tokio::time::timeout(interval * 10, resolve("replicas", interval, look_up, tell)).await;
        assert!(ended.is_err(), "it goes on");
        assert_eq!(*told.lock().unwrap(), [vec![address(1), address(2)], vec![address(3)], Vec::new()]);
    }
}
