//! The command line and the environment variables. The doc comments of the fields are the help text and the reference
//! in the documentation.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum, value_parser};
use operator_api::Period;
use process::env_with_prefix;
pub use process::logs::LogFormat;

/// Manage LLMDeployments on a Kubernetes cluster, or run one of them on this machine.
#[derive(Clone, Debug, Parser)]
#[command(name = "ovfleet-operator", version, max_term_width = 110, after_long_help = EXAMPLES)]
#[command(mut_args(env_with_prefix("OVFLEET_OPERATOR_")))]
pub struct Args {
    /// The subcommand to run.
    #[command(subcommand)]
    pub command: Command,

    /// Log level: error, warn, info, debug or trace. Modules can have separate levels, as in info,operator=debug.
    #[arg(long, value_name = "FILTER", default_value = "info", global = true)]
    pub log: String,

    /// Format of the log on standard error.
    #[arg(long, value_enum, default_value = "text", global = true)]
    pub log_format: LogFormat,
}

const EXAMPLES: &str = "\
Examples:
  ovfleet-operator crd | kubectl apply -f -
  ovfleet-operator run --namespace models
  ovfleet-operator local -f deploy/samples/smollm2.yaml
  ovfleet-operator local -f deploy/samples/smollm2.yaml --model model.gguf --set engine.kvCache.size=1Gi";

/// A subcommand of the operator.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Manage the LLMDeployments of a cluster.
    Run(RunArgs),
    /// Run one LLMDeployment on this machine, with its replicas and a router as child processes.
    Local(LocalArgs),
    /// Print the custom resource definition, for kubectl.
    Crd,
    /// Execute a program that the kernel kills when the parent process exits. `local` starts its processes this way.
    #[command(hide = true)]
    DieWithParent(DieWithParentArgs),
}

/// The arguments of `ovfleet-operator run`.
#[derive(Clone, Debug, ClapArgs)]
#[command(mut_args(env_with_prefix("OVFLEET_OPERATOR_")))]
pub struct RunArgs {
    /// Namespace whose LLMDeployments are managed. Repeatable. Default: all namespaces.
    #[arg(long = "namespace", short = 'n', value_name = "NAME", value_delimiter = ',')]
    pub namespaces: Vec<String>,

    /// Image of the server for resources that do not set engine.image.
    #[arg(long, value_name = "IMAGE", default_value = "ovfleet/server:dev", help_heading = "Images")]
    pub server_image: String,

    /// Image of the router for resources that do not set router.image.
    #[arg(long, value_name = "IMAGE", default_value = "ovfleet/router:dev", help_heading = "Images")]
    pub router_image: String,

    /// Image pull policy: Always, IfNotPresent or Never. Default: Kubernetes selects the policy.
    #[arg(
        long,
        value_name = "POLICY",
        value_parser = ["Always", "IfNotPresent", "Never"],
        help_heading = "Images"
    )]
    pub image_pull_policy: Option<String>,

    /// Address on which probes and metrics are served.
    #[arg(long, default_value = "127.0.0.1", help_heading = "Network")]
    pub host: IpAddr,

    /// Port on which probes and metrics are served. 0 selects any free port.
    #[arg(long, default_value_t = 8080, help_heading = "Network")]
    pub port: u16,

    /// Run without leader election. For development only: two active operators interfere with each other.
    #[arg(long, help_heading = "Leader")]
    pub no_leader_election: bool,

    /// Namespace of the Lease for leader election. Default: the namespace of the operator.
    #[arg(long, value_name = "NAME", help_heading = "Leader")]
    pub lease_namespace: Option<String>,

    /// Name of the Lease for leader election.
    #[arg(long, value_name = "NAME", default_value = "ovfleet-operator", help_heading = "Leader")]
    pub lease_name: String,

    /// Time within which the leader must renew the Lease. Values below 1s have the same effect as 1s.
    ///
    /// If exceeded: another operator becomes the leader. A leader that has not renewed the Lease for two thirds of this
    /// time exits with an error.
    #[arg(long, value_name = "TIME", default_value = "15s", value_parser = duration, help_heading = "Leader")]
    pub lease_duration: Duration,

    /// Name of this process in the Lease. Default: the host name and a random number.
    #[arg(long, value_name = "NAME", help_heading = "Leader")]
    pub identity: Option<String>,

    /// Interval at which the operator updates the status with the KV cache usage that routers report. 0s disables
    /// these periodic updates.
    #[arg(
        long,
        value_name = "TIME",
        default_value = "30s",
        value_parser = duration,
        help_heading = "Reconciliation"
    )]
    pub load_interval: Duration,

    /// Maximum number of serving resources whose pods are replaced at the same time after an upgrade of the operator.
    /// Pods are replaced if the new version uses different default images or pod templates. The limit does not apply to
    /// resources that serve no requests.
    ///
    /// If exceeded: the other resources wait. A resource counts toward the limit until its new pods are ready, so with
    /// a limit of 1, a failed upgrade of one resource blocks the upgrades of the others.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 1,
        value_parser = value_parser!(u16).range(1..=1024),
        help_heading = "Reconciliation"
    )]
    pub max_concurrent_upgrades: u16,

    /// IP family that pods listen on.
    #[arg(long, value_enum, default_value = "auto", help_heading = "Network")]
    pub ip_family: IpFamily,

    /// Maximum number of resources that are reconciled at the same time. If --namespace is repeated, the limit applies
    /// to each namespace.
    ///
    /// If exceeded: the other resources wait.
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 8,
        value_parser = value_parser!(u16).range(1..=256),
        help_heading = "Reconciliation"
    )]
    pub max_concurrent_reconciles: u16,

    /// OTLP endpoint (gRPC) to which spans of reconciles are sent, such as http://HOST:4317. Default: no spans are
    /// sent.
    #[arg(long, value_name = "URL", help_heading = "Logs")]
    pub otlp_endpoint: Option<String>,
}

/// The arguments of `ovfleet-operator local`.
#[derive(Clone, Debug, ClapArgs)]
#[command(mut_args(env_with_prefix("OVFLEET_OPERATOR_LOCAL_")))]
pub struct LocalArgs {
    /// File that contains the LLMDeployment, in the format that kubectl accepts.
    #[arg(long, short = 'f', value_name = "PATH")]
    pub file: PathBuf,

    /// Path of the model on this machine. Overrides the source of the model, and is required if that source is pvc or
    /// oci.
    #[arg(long, value_name = "PATH")]
    pub model: Option<PathBuf>,

    /// Number of replicas. Overrides the `replicas` and `suspend` fields of the resource. If engine.device is CPU, the
    /// processors are divided equally among the replicas.
    #[arg(long, value_name = "COUNT", value_parser = value_parser!(i32).range(1..=256))]
    pub replicas: Option<i32>,

    /// A field of the spec and its value in YAML, such as engine.kvCache.size=2Gi or engine.extraArgs=[--max-itl=50ms].
    /// Overrides the file. An empty value removes the field. Repeatable.
    #[arg(long = "set", value_name = "FIELD=VALUE")]
    pub settings: Vec<String>,

    /// Address that the router listens on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// Port that the router listens on. 0 selects any free port.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,

    /// Directory for fetched and compiled models. Default: the directory ovfleet in the user's cache directory.
    #[arg(long, value_name = "PATH")]
    pub cache: Option<PathBuf>,

    /// Directory with the credentials for downloads. It contains one file for each key of the Secret in
    /// model.credentialsSecretRef. Required if the resource sets that field, unless --model is given.
    #[arg(long, value_name = "PATH")]
    pub credentials: Option<PathBuf>,

    /// File with API keys, which is used instead of the Secret in access.apiKeysSecretRef. Required if the resource
    /// sets that field.
    #[arg(long, value_name = "PATH")]
    pub api_keys: Option<PathBuf>,

    /// Path of the server's executable. Default: ovfleet-server in the directory of this program or in PATH.
    #[arg(long, value_name = "PATH")]
    pub server: Option<PathBuf>,

    /// Path of the router's executable. Default: ovfleet-router in the directory of this program or in PATH.
    #[arg(long, value_name = "PATH")]
    pub router: Option<PathBuf>,
}

/// The arguments of `ovfleet-operator die-with-parent`.
#[derive(Clone, Debug, ClapArgs)]
pub struct DieWithParentArgs {
    /// The ID of the parent process.
    #[arg(long)]
    pub parent: i32,

    /// The program to execute, and its arguments.
    #[arg(last = true, required = true)]
    pub command: Vec<OsString>,
}

/// The IP family that pods listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IpFamily {
    /// The family of the API server's address in KUBERNETES_SERVICE_HOST; IPv4 if the variable contains a host name or
    /// is not set.
    Auto,
    /// Pods listen on IPv4 only.
    Ipv4,
    /// Pods listen on IPv6, and also on IPv4 in dual-stack clusters.
    Ipv6,
}

impl IpFamily {
    /// Returns the unspecified address of the family. `api_server` is the host name or address of the API server.
    #[must_use]
    pub fn unspecified_address(self, api_server: Option<&str>) -> IpAddr {
        let is_ipv6 = match self {
            Self::Auto => api_server.is_some_and(|host| host.parse::<Ipv6Addr>().is_ok()),
            Self::Ipv4 => false,
            Self::Ipv6 => true,
        };
        if is_ipv6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    Period(text.to_owned()).duration().map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_listen_on_the_ip_family_of_the_api_server() {
        let listen = |family: IpFamily, api_server| family.unspecified_address(api_server).to_string();
        assert_eq!(listen(IpFamily::Auto, Some("fd00:10:96::1")), "::");
        assert_eq!(listen(IpFamily::Auto, Some("10.96.0.1")), "0.0.0.0");
        assert_eq!(listen(IpFamily::Auto, Some("kubernetes.default")), "0.0.0.0");
        assert_eq!(listen(IpFamily::Auto, None), "0.0.0.0");
        assert_eq!(listen(IpFamily::Ipv6, Some("10.96.0.1")), "::");
    }
}
