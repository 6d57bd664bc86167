//! Discovers replicas through fixed addresses, DNS names and Kubernetes Services. Each source publishes its complete
//! list of replicas whenever the list changes.
//!
//! ```text
//! fixed ─┐
//! DNS ───┼─► discovery::run (the union) ─► watch ─► Replicas
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

mod client;
mod names;
mod replica;
pub mod slices;

pub use names::{DnsName, FixedReplica, PortNames, ServiceName};
pub use replica::{DiscoveredReplica, Pod};

/// Number of lists that wait to be merged.
const LISTS_MAX: usize = 16;

/// The sources of replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sources {
    /// Replicas with a fixed address.
    pub fixed: Vec<FixedReplica>,
    /// DNS names of replicas.
    pub dns: Vec<DnsName>,
    /// Kubernetes Services of replicas.
    pub services: Vec<ServiceName>,
    /// The interval between DNS lookups.
    pub dns_interval: Duration,
    /// The names of the ports of the Services.
    pub port_names: PortNames,
}

/// One source with its settings.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Source {
    Fixed(FixedReplica, Duration),
    Dns(DnsName, Duration),
    Service(ServiceName, PortNames),
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

/// Follows all `sources`, and publishes the union of their replicas in `discovered` whenever the union changes. When
/// `sources` changes, the sources that it still contains continue without interruption. The replicas of a source whose
/// settings change remain until the source has been read again.
///
/// # Cancel safety
/// Dropping the future ends all tasks that it has started.
pub async fn run(mut sources: watch::Receiver<Sources>, discovered: watch::Sender<Vec<DiscoveredReplica>>) {
    let (lists, mut inbox) = mpsc::channel(LISTS_MAX);
    let mut tasks = JoinSet::new();
    let mut running: BTreeMap<Source, (AbortHandle, Vec<DiscoveredReplica>)> = BTreeMap::new();
    loop {
        let current: Vec<Source> = sources.borrow_and_update().all().collect();
        // The replicas of the removed sources, by the name of the source. A source whose settings changed has the same
        // name, and therefore takes over its previous replicas below.
        let mut known: BTreeMap<String, Vec<DiscoveredReplica>> = BTreeMap::new();
        running.retain(|source, (task, replicas)| {
            let stays = current.contains(source);
            if !stays {
                task.abort();
                known.insert(source.to_string(), std::mem::take(replicas));
            }
            stays
        });
        for source in current {
            running.entry(source.clone()).or_insert_with(|| {
                let replicas = known.remove(&source.to_string()).unwrap_or_default();
                let lists = lists.clone();
                (tasks.spawn(async move { follow(source, lists).await }), replicas)
            });
        }
        publish(&running, &discovered);
        loop {
            tokio::select! {
                changed = sources.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                Some((source, replicas)) = inbox.recv() => {
                    if let Some((_, known)) = running.get_mut(&source) {
                        *known = replicas;
                        publish(&running, &discovered);
                    }
                }
                // A task ends when its source has been removed, or after it has sent a fixed IP address.
                Some(_) = tasks.join_next() => {}
            }
        }
    }
}

fn publish(
    running: &BTreeMap<Source, (AbortHandle, Vec<DiscoveredReplica>)>,
    discovered: &watch::Sender<Vec<DiscoveredReplica>>,
) {
    let mut union: Vec<DiscoveredReplica> =
        running.values().flat_map(|(_, replicas)| replicas.clone()).collect();
    // Two sources can list the same address, which still belongs to a single replica. Prefer an entry with an address
    // for load reports, and then an entry with a pod.
    union.sort_by_key(|replica| (replica.http, replica.grpc.is_none(), replica.pod.is_none()));
    union.dedup_by_key(|replica| replica.http);
    discovered.send_if_modified(|present| {
        let differs = *present != union;
        if differs {
            *present = union;
        }
        differs
    });
}

/// Sends the lists of replicas together with their sources.
type Lists = mpsc::Sender<(Source, Vec<DiscoveredReplica>)>;

/// Sends the replicas of a source whenever they change.
async fn follow(source: Source, lists: Lists) {
    let send = |replicas: Vec<DiscoveredReplica>| {
        let list = (source.clone(), replicas);
        let lists = lists.clone();
        async move {
            let _ = lists.send(list).await;
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
                return send(vec![replica(address)]).await;
            }
            // The name identifies one machine, so only its first address is used.
            let first = |addresses: Vec<IpAddr>| send(addresses.into_iter().take(1).map(replica).collect());
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
                send(addresses.into_iter().map(replica).collect())
            };
            resolve(host, *interval, || look_up(host), all).await;
        }
        Source::Service(service, ports) => {
            slices::watch(service, ports, send).await;
        }
    }
}

async fn look_up(host: &str) -> io::Result<Vec<IpAddr>> {
    let addresses = tokio::net::lookup_host((host, 0)).await?;
    Ok(addresses.map(|address| address.ip()).collect())
}

/// Looks up `host` periodically, and calls `on_change` when its addresses change. A failed lookup changes nothing,
/// because the replicas may be available even if DNS is not.
async fn resolve<L, T>(
    host: &str,
    interval: Duration,
    look_up: impl Fn() -> L,
    on_change: impl Fn(Vec<IpAddr>) -> T,
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
                    tracing::info!(host, ?addresses, "resolved new addresses of replicas");
                    known = Some(addresses.clone());
                    on_change(addresses).await;
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
            port_names: PortNames { http: "http".to_owned(), grpc: "grpc".to_owned() },
        }
    }

    #[tokio::test]
    async fn publishes_the_union_of_all_sources_and_follows_their_changes() {
        let (sources_sender, receiver) =
            watch::channel(sources(&["127.0.0.1:2/3", "127.0.0.1:1", "127.0.0.1:2/3", "localhost:9"]));
        let (sender, mut discovered) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(run(receiver, sender));
        let names = discovered.wait_for(|discovered| discovered.len() == 3).await.unwrap().clone();
        let names: Vec<_> = names.into_iter().map(|discovered| discovered.name).collect();
        assert!(names.contains(&"localhost:9".to_owned()) && names.contains(&"127.0.0.1:2".to_owned()));
        sources_sender.send(sources(&["127.0.0.1:1"])).unwrap();
        let left = discovered.wait_for(|discovered| discovered.len() == 1).await.unwrap().clone();
        assert_eq!(left[0].http.port(), 1);
        let dns: Vec<DnsName> = vec!["localhost:7/8".parse().unwrap()];
        sources_sender.send(Sources { dns: dns.clone(), ..sources(&[]) }).unwrap();
        let every = |discovered: &Vec<DiscoveredReplica>| {
            !discovered.is_empty() && discovered.iter().all(|discovered| discovered.http.port() == 7)
        };
        let all = discovered.wait_for(every).await.unwrap().clone();
        assert!(
            all.iter()
                .all(|discovered| discovered.http.ip().is_loopback() && discovered.grpc.unwrap().port() == 8),
            "{all:?}"
        );
        // When the interval changes, the previous addresses remain valid until the next lookup, so the first list after
        // the change contains them and the address of the new source.
        let dns_interval = Duration::from_secs(60);
        sources_sender.send(Sources { dns, dns_interval, ..sources(&["127.0.0.1:1"]) }).unwrap();
        discovered.changed().await.unwrap();
        assert_eq!(discovered.borrow_and_update().len(), all.len() + 1);
    }

    #[tokio::test]
    async fn a_source_without_the_address_of_load_reports_does_not_hide_that_of_another() {
        let (_sources, receiver) = watch::channel(sources(&["127.0.0.1:2", "127.0.0.1:2/3"]));
        let (sender, mut discovered) = watch::channel(Vec::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(run(receiver, sender));
        let has_reports = |discovered: &Vec<DiscoveredReplica>| {
            discovered.iter().any(|replica| replica.grpc.is_some_and(|grpc| grpc.port() == 3))
        };
        let discovered = tokio::time::timeout(Duration::from_secs(30), discovered.wait_for(has_reports));
        assert_eq!(discovered.await.expect("the replica reports its load").unwrap().len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn addresses_change_with_dns_and_stay_while_a_lookup_fails() {
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
        let published = Mutex::new(Vec::new());
        let publish = |addresses| {
            published.lock().unwrap().push(addresses);
            std::future::ready(())
        };
        let interval = Duration::from_secs(5);
        let ended =
            tokio::time::timeout(interval * 10, resolve("replicas", interval, look_up, publish)).await;
        assert!(ended.is_err(), "discovery never ends");
        assert_eq!(*published.lock().unwrap(), [vec![address(1), address(2)], vec![address(3)], Vec::new()]);
    }
}
