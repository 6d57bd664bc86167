//! Finds the programs of a control plane, in the directory `KUBEBUILDER_ASSETS` or in that of `scripts/tools`. It
//! neither builds nor downloads them.

use std::path::{Path, PathBuf};

use anyhow::bail;

/// A program of a Kubernetes control plane, or its command-line client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// The store of the API server.
    Etcd,
    /// The Kubernetes API server.
    ApiServer,
    /// The controllers of Deployments, Jobs, garbage collection and so on.
    ControllerManager,
    /// The command-line client of Kubernetes.
    Kubectl,
}

impl Program {
    /// The file name of the program.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ControllerManager => "kube-controller-manager",
            Self::Kubectl => "kubectl",
        }
    }

    /// Returns the path of the program.
    ///
    /// # Errors
    /// The program is in neither directory; the message names both and says how to build it.
    pub fn find(self) -> anyhow::Result<PathBuf> {
        let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from);
        self.find_in(assets.as_deref(), &crate::root().join(".deps/tools/bin"))
    }

    fn find_in(self, assets: Option<&Path>, built: &Path) -> anyhow::Result<PathBuf> {
        let name = self.name();
        for directory in assets.into_iter().chain([built]) {
            let path = directory.join(name);
            if path.is_file() {
                return Ok(path);
            }
        }
        let assets = assets.map_or_else(
            || "KUBEBUILDER_ASSETS is not set".to_owned(),
            |directory| format!("KUBEBUILDER_ASSETS={} does not contain it", directory.display()),
        );
        bail!(
            "{name} is missing: {assets}, and {} does not contain it; run scripts/tools to build it",
            built.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefers_the_directory_in_the_environment() {
        let assets = tempfile::tempdir().unwrap();
        let built = tempfile::tempdir().unwrap();
        for directory in [&assets, &built] {
            std::fs::write(directory.path().join("etcd"), "").unwrap();
        }
        std::fs::write(built.path().join("kubectl"), "").unwrap();
        let find = |program: Program| program.find_in(Some(assets.path()), built.path());
        assert_eq!(find(Program::Etcd).unwrap(), assets.path().join("etcd"));
        assert_eq!(find(Program::Kubectl).unwrap(), built.path().join("kubectl"));
        let missing = find(Program::ApiServer).unwrap_err().to_string();
        assert!(missing.contains("kube-apiserver is missing: KUBEBUILDER_ASSETS="), "{missing}");
    }
}
