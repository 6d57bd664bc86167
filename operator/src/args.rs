//! The command line, which is also where the environment is read. The comments on the fields are the help text and the
//! reference in the documentation.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};
use operator_api::Period;

/// Look after LLMDeployments: on a Kubernetes cluster, or one of them on this machine.
#[derive(Clone, Debug, Parser)]
#[command(name = "operator", version, max_term_width = 110, after_long_help = EXAMPLES)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,

    /// What is logged: error, warn, info, debug, trace, or per part, e.g. info,operator=debug.
    #[arg(long, env = "OVFLEET_OPERATOR_LOG", value_name = "FILTER", default_value = "info", global = true)]
    pub log: String,

    /// How logs are written, to standard error.
    #[arg(long, env = "OVFLEET_OPERATOR_LOG_FORMAT", value_enum, default_value = "text", global = true)]
    pub log_format: LogFormat,
}

const EXAMPLES: &str = "\
Examples:
  operator crd | kubectl apply -f -
  operator run --namespace models
  operator local -f deploy/samples/smollm2.yaml
  operator local -f deploy/samples/smollm2.yaml --model model.gguf --set engine.kvCache.size=1Gi";

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Look after the LLMDeployments of a cluster.
    Run(RunArgs),
    /// Run one LLMDeployment on this machine: its replicas and a router, as child processes.
    Local(LocalArgs),
    /// Print the definition of the resource, for kubectl.
    Crd,
    /// Become a program that does not outlive whoever started it: how `local` starts its processes.
    #[command(hide = true)]
    Tether(TetherArgs),
}

/// How to look after a cluster.
#[derive(Clone, Debug, ClapArgs)]
pub struct RunArgs {
    /// A namespace to look after. Repeatable. Default: all of them.
    #[arg(
        long = "namespace",
        short = 'n',
        env = "OVFLEET_OPERATOR_NAMESPACE",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub namespaces: Vec<String>,

    /// The server's image, where a resource names none.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_SERVER_IMAGE",
        value_name = "IMAGE",
        default_value = "ovfleet/server:dev",
        help_heading = "Images"
    )]
    pub server_image: String,

    /// The router's image, where a resource names none.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_ROUTER_IMAGE",
        value_name = "IMAGE",
        default_value = "ovfleet/router:dev",
        help_heading = "Images"
    )]
    pub router_image: String,

    /// When images are pulled: Always, IfNotPresent, Never. Default: Kubernetes' own.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_IMAGE_PULL_POLICY",
        value_name = "POLICY",
        value_parser = ["Always", "IfNotPresent", "Never"],
        help_heading = "Images"
    )]
    pub image_pull_policy: Option<String>,

    /// The address of probes and metrics.
    #[arg(long, env = "OVFLEET_OPERATOR_HOST", default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// The port of probes and metrics. 0 takes any free one.
    #[arg(long, env = "OVFLEET_OPERATOR_PORT", default_value_t = 8080, help_heading = "Network")]
    pub port: u16,

    /// Act without asking whether another operator does. For trying out: two that act get in each other's way.
    #[arg(long, env = "OVFLEET_OPERATOR_NO_LEADER_ELECTION", help_heading = "Leader")]
    pub no_leader_election: bool,

    /// The namespace of the Lease whose holder acts. Default: the operator's own.
    #[arg(long, env = "OVFLEET_OPERATOR_LEASE_NAMESPACE", value_name = "NAME", help_heading = "Leader")]
    pub lease_namespace: Option<String>,

    /// The name of the Lease.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_LEASE_NAME",
        value_name = "NAME",
        default_value = "ovfleet-operator",
        help_heading = "Leader"
    )]
    pub lease_name: String,

    /// Time for which the leader may fail to renew the Lease.
    ///
    /// Beyond it: another operator takes over, and the former leader ends with an error.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_LEASE_DURATION",
        value_name = "TIME",
        default_value = "15s",
        value_parser = duration,
        help_heading = "Leader"
    )]
    pub lease_duration: Duration,

    /// How this process is called in the Lease. Default: the host's name and a number.
    #[arg(long, env = "OVFLEET_OPERATOR_IDENTITY", value_name = "NAME", help_heading = "Leader")]
    pub identity: Option<String>,

    /// How often routers are asked how full the KV caches are, for `kubectl get`. 0s is never.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_LOAD_INTERVAL",
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration,
        help_heading = "Work"
    )]
    pub load_interval: Duration,

    /// Number of resources whose pods are replaced at the same time after an upgrade of the operator, because the new
    /// version has other default images or renders other pods.
    ///
    /// Beyond it: the other resources wait until the pods are ready; a resource whose pods do not become ready holds
    /// up the others.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_MAX_CONCURRENT_UPGRADES",
        value_name = "COUNT",
        default_value_t = 1,
        value_parser = clap::value_parser!(u16).range(1..=1024),
        help_heading = "Work"
    )]
    pub max_concurrent_upgrades: u16,

    /// The IP family that pods listen on. Default: the one of the address at which the operator reaches the API server.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_IP_FAMILY",
        value_enum,
        default_value = "auto",
        help_heading = "Network"
    )]
    pub ip_family: IpFamily,

    /// Number of resources that are reconciled at the same time.
    ///
    /// Beyond it: the other resources wait.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_CONCURRENCY",
        value_name = "COUNT",
        default_value_t = 8,
        value_parser = clap::value_parser!(u16).range(1..=256),
        help_heading = "Work"
    )]
    pub concurrency: u16,

    /// Where spans of reconciles are sent, OTLP over gRPC: http://HOST:4317. Default: nowhere.
    #[arg(long, env = "OVFLEET_OPERATOR_OTLP_ENDPOINT", value_name = "URL", help_heading = "Logs")]
    pub otlp_endpoint: Option<String>,
}

/// What to run on this machine.
#[derive(Clone, Debug, ClapArgs)]
pub struct LocalArgs {
    /// The file with the LLMDeployment, as for kubectl.
    #[arg(long, short = 'f', env = "OVFLEET_OPERATOR_LOCAL_FILE", value_name = "PATH")]
    pub file: PathBuf,

    /// The model's path on this machine, instead of the resource's source. Needed where that is a claim or an image.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_MODEL", value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// How many replicas, instead of what the resource says. Each has its part of the processors.
    #[arg(
        long,
        env = "OVFLEET_OPERATOR_LOCAL_REPLICAS",
        value_name = "COUNT",
        value_parser = clap::value_parser!(i32).range(1..=256)
    )]
    pub replicas: Option<i32>,

    /// A field of the resource's spec and its value in YAML, instead of what the file says. Repeatable, as in
    /// --set engine.kvCache.size=2Gi --set engine.extraArgs=[--weights=compact].
    #[arg(long = "set", env = "OVFLEET_OPERATOR_LOCAL_SET", value_name = "FIELD=VALUE")]
    pub settings: Vec<String>,

    /// The address that the router listens on.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_HOST", default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// The port that the router listens on. 0 takes any free one.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_PORT", default_value_t = 8000)]
    pub port: u16,

    /// Where fetched models are kept, and compiled ones. Default: ovfleet in the user's folder for caches.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_CACHE", value_name = "PATH")]
    pub cache: Option<PathBuf>,

    /// The folder of files with credentials for fetching, named as the keys of the Secret would be.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_CREDENTIALS", value_name = "PATH")]
    pub credentials: Option<PathBuf>,

    /// The file with API keys, instead of a Secret.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_API_KEYS", value_name = "PATH")]
    pub api_keys: Option<PathBuf>,

    /// The server's program. Default: the one beside this program, or in PATH.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_SERVER", value_name = "PATH")]
    pub server: Option<PathBuf>,

    /// The router's program. Default: the one beside this program, or in PATH.
    #[arg(long, env = "OVFLEET_OPERATOR_LOCAL_ROUTER", value_name = "PATH")]
    pub router: Option<PathBuf>,
}

/// What to become, and until when.
#[derive(Clone, Debug, ClapArgs)]
pub struct TetherArgs {
    /// The number of the process that it goes with.
    #[arg(long)]
    pub parent: i32,

    /// The program and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

/// An IP family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IpFamily {
    /// As the API server's address.
    Auto,
    /// IPv4.
    Ipv4,
    /// IPv6. Pods of clusters with both families can be reached by IPv4 too.
    Ipv6,
}

impl IpFamily {
    /// The address that stands for all addresses of the family. `api_server` is where the API server is.
    #[must_use]
    pub fn listen(self, api_server: Option<&str>) -> IpAddr {
        let is_ipv6 = match self {
            Self::Auto => api_server.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok()),
            Self::Ipv4 => false,
            Self::Ipv6 => true,
        };
        if is_ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
    }
}

/// How logs are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For machines: one JSON object on each line.
    Json,
}

fn duration(text: &str) -> Result<Duration, String> {
    Period(text.to_owned()).duration().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_listen_where_the_cluster_can_reach_them() {
        let listen = |family: IpFamily, api_server| family.listen(api_server).to_string();
        assert_eq!(listen(IpFamily::Auto, Some("fd00:10:96::1")), "::");
        assert_eq!(listen(IpFamily::Auto, Some("10.96.0.1")), "0.0.0.0");
        assert_eq!(listen(IpFamily::Auto, Some("kubernetes.default")), "0.0.0.0");
        assert_eq!(listen(IpFamily::Auto, None), "0.0.0.0");
        assert_eq!(listen(IpFamily::Ipv6, Some("10.96.0.1")), "::");
    }
}
