//! Tests the control plane that other tests use.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, ObjectMeta, PostParams};
use tests::cluster::{self, ControlPlane};
use tests::process;

const LIMIT: Duration = Duration::from_secs(60);

fn config_map(name: &str, owner: Option<&ConfigMap>) -> ConfigMap {
    let owner_references = owner.map(|owner| {
        vec![OwnerReference {
            api_version: "v1".to_owned(),
            kind: "ConfigMap".to_owned(),
            name: owner.metadata.name.clone().unwrap_or_default(),
            uid: owner.metadata.uid.clone().unwrap_or_default(),
            ..OwnerReference::default()
        }]
    });
    ConfigMap {
        metadata: ObjectMeta { name: Some(name.to_owned()), owner_references, ..ObjectMeta::default() },
        data: Some(BTreeMap::from([("key".to_owned(), "value".to_owned())])),
        ..ConfigMap::default()
    }
}

async fn await_absence(api: &Api<ConfigMap>, name: &str) -> anyhow::Result<()> {
    let end = Instant::now() + LIMIT;
    while api.get_opt(name).await?.is_some() {
        if Instant::now() > end {
            bail!("{name} still exists after {LIMIT:?}");
        }
        tokio::task::yield_now().await;
    }
    Ok(())
}

#[tokio::test]
async fn the_control_plane_is_complete_and_leaves_no_process() -> anyhow::Result<()> {
    let mut plane = ControlPlane::start_with_controllers().await?;
    let client = plane.client().await?;
    let namespace = cluster::namespace(&client, "plane").await?;
    let maps = Api::<ConfigMap>::namespaced(client, &namespace);

    // The garbage collector deletes dependents.
    let owner = maps.create(&PostParams::default(), &config_map("owner", None)).await?;
    maps.create(&PostParams::default(), &config_map("owned", Some(&owner))).await?;
    maps.create(&PostParams::default(), &config_map("kept", None)).await?;
    maps.delete("owner", &DeleteParams::default()).await?;
    await_absence(&maps, "owned").await?;

    // Permissions are checked.
    let stranger = plane.client_for("stranger", None).await?;
    let refused = Api::<ConfigMap>::namespaced(stranger, &namespace).get("kept").await.unwrap_err();
    assert!(matches!(&refused, kube::Error::Api(status) if status.code == 403), "{refused}");

    // Objects survive a restart of the API server.
    plane.kill_api_server()?;
    assert!(maps.get("kept").await.is_err());
    plane.start_api_server().await?;
    assert!(maps.get("kept").await.is_ok());

    let listed = plane.kubectl(&["get", "configmap", "kept", "-n", &namespace, "-o", "name"])?.output()?;
    assert_eq!(String::from_utf8(listed.stdout)?.trim(), "configmap/kept");

    let processes = plane.processes();
    assert_eq!(processes.len(), 3);
    drop(plane);
    for group in processes {
        assert!(!process::group_exists(group), "process group {group} remains");
    }
    Ok(())
}
