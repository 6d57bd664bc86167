//! Where the programs of a control plane are: in the folder that `KUBEBUILDER_ASSETS` names, else in the one
//! that `scripts/tools` builds into. Nothing is built or downloaded from here.

use std::path::{Path, PathBuf};

use anyhow::bail;

/// A program of Kubernetes that tests start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The store.
    Etcd,
    /// The API server.
    ApiServer,
    /// Deployments, Jobs, garbage collection and the rest.
    ControllerManager,
    /// Puts pods on nodes.
    Scheduler,
    /// The command line.
    Kubectl,
}

impl Program {
    /// The name of its file.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Kubectl => "kubectl",
        }
    }

    /// Where it is.
    ///
    /// # Errors
    /// It is in none of the places; the message says which those are and what to do.
    pub fn find(self) -> anyhow::Result<PathBuf> {
        let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
        self.find_in(assets.as_deref(), &crate::root().join(".deps/tools/bin"))
    }

    fn find_in(self, assets: Option<&Path>, built: &Path) -> anyhow::Result<PathBuf> {
        let name = self.name();
        for folder in assets.into_iter().chain([built]) {
            let path = folder.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
        let assets = assets.map_or_else(
            || "KUBEBUILDER_ASSETS is not set".to_owned(),
            |folder| format!("KUBEBUILDER_ASSETS={} has none", folder.display()),
        );
        bail!("{name} is missing: {assets}, and {} has none; scripts/tools builds it", built.display())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_the_folder_that_the_environment_names() {
        let assets = tempfile::tempdir().unwrap();
        let built = tempfile::tempdir().unwrap();
        for folder in [&assets, &built] {
            std::fs::write(folder.path().join("etcd"), "").unwrap();
        }
        std::fs::write(built.path().join("kubectl"), "").unwrap();
        let find = |program: Program| program.find_in(Some(assets.path()), built.path());
        assert_eq!(find(Program::Etcd).unwrap(), assets.path().join("etcd"));
        assert_eq!(find(Program::Kubectl).unwrap(), built.path().join("kubectl"));
        let missing = find(Program::ApiServer).unwrap_err().to_string();
        assert!(missing.contains("kube-apiserver is missing: KUBEBUILDER_ASSETS="), "{missing}");
    }
}
