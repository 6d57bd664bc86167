//! Which model, and how its files come to the replicas.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{formats, resources, rules};

/// The model that is served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.cache) || self.cache.mode == 'none' || !(has(self.source.pvc) || has(self.source.oci))", "a model in a volume or an image is not fetched, so there is nothing to cache: leave model.cache out"), ("!has(self.fetch) || !(has(self.source.pvc) || has(self.source.oci))", "a model in a volume or an image is not fetched: leave model.fetch out"), ("!has(self.credentialsSecretRef) || !(has(self.source.pvc) || has(self.source.oci))", "model.credentialsSecretRef is for models that are fetched (hf, http, s3); for a private image use \
security.imagePullSecrets")])))]
pub struct Model {
    /// The name by which requests ask for the model. Default: the name of this resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), extend("x-kubernetes-validations" = formats::model_name()))]
    pub name: Option<String>,

    /// Further names for the same model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 128)))]
    #[schemars(extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = formats::model_names()))]
    pub aliases: Vec<String>,

    /// Where the model's files are. Exactly one of its fields.
    pub source: Source,

    /// What the files are: `gguf`, `openvino-ir`, or `auto`, which goes by their names.
    #[serde(default)]
    pub format: Format,

    /// A Secret of the same namespace with what is needed to fetch the model. It is mounted into the container
    /// that fetches and nowhere else; the operator does not read it. Keys: `token` (hf, http: a bearer token),
    /// `username` and `password` (http), `accessKeyId`, `secretAccessKey` and `sessionToken` (s3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<LocalReference>,

    /// Where fetched files are kept (hf, http, s3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,

    /// How files are fetched (hf, http, s3).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<Fetch>,
}

/// How files are fetched: the container that fetches, be it in a Job or in the pod of a replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Fetch {
    /// Environment variables, as in `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` for a proxy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub env: BTreeMap<String, String>,
    /// A ConfigMap with the certificates of further authorities that sources may be certified by, such as those of a
    /// proxy or of a mirror.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_bundle: Option<CaBundle>,
    /// Annotations of the ServiceAccount that fetches, by which clouds give identities to pods.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub service_account_annotations: BTreeMap<String, String>,
    /// Processors, memory and ephemeral storage of the container. Default: 500m, 256Mi, and `model.cache.size` of
    /// ephemeral storage where the files are in scratch space.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources")]
    pub resources: Option<ResourceRequirements>,
}

/// A ConfigMap with certificates of authorities, in PEM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CaBundle {
    /// Its name.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub config_map: String,
    /// Which of its entries.
    #[serde(default = "ca_bundle_key")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn ca_bundle_key() -> String {
    "ca.crt".to_owned()
}

/// Where the model's files are.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("[has(self.hf), has(self.http), has(self.s3), has(self.oci), has(self.pvc)].filter(given, given).size() == 1", "model.source needs exactly one of hf, http, s3, oci and pvc")])))]
pub struct Source {
    /// A repository of the Hugging Face Hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hf: Option<HuggingFaceSource>,
    /// A file on a web server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSource>,
    /// Objects in S3 or a service like it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// A container image that holds the files, mounted as a volume (Kubernetes 1.33 and a runtime that can).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci: Option<OciSource>,
    /// A PersistentVolumeClaim that holds the files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
}

/// A repository of the Hugging Face Hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HuggingFaceSource {
    /// The repository, `owner/name`.
    #[schemars(
        length(max = 256),
        extend("x-kubernetes-validations" = formats::repository())
    )]
    pub repo: String,
    /// A branch, a tag or the full hash of a commit. The first replica to fetch it decides which commit it is; that is kept
    /// (`status.modelRevision`), and all others fetch the same, until this field changes.
    #[serde(default = "main_branch")]
    #[schemars(length(min = 1, max = 256), extend("x-kubernetes-validations" = formats::revision()))]
    pub revision: String,
    /// Names of the files to fetch; `*` stands for any part of a name. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 512)))]
    pub files: Vec<String>,
    /// The Hub's address, for a mirror of it.
    #[serde(default = "hub")]
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::url()))]
    pub endpoint: String,
}

/// A file on a web server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpSource {
    /// The address of the file.
    #[schemars(length(max = 2048), extend("x-kubernetes-validations" = formats::url()))]
    pub url: String,
    /// The SHA-256 of the file, in hexadecimal: what arrives and differs is not served. Without it, what arrives
    /// is served.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = formats::sha256()))]
    pub sha256: Option<String>,
}

/// Objects in S3 or a service like it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct S3Source {
    /// The bucket.
    #[schemars(length(min = 3, max = 63), extend("x-kubernetes-validations" = formats::bucket()))]
    pub bucket: String,
    /// The object's key; or, ending in `/`, a folder all of whose objects are fetched.
    #[schemars(length(min = 1, max = 1024))]
    pub key: String,
    /// The region that signatures are for.
    #[serde(default = "region")]
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-validations" = formats::region()))]
    pub region: String,
    /// The service's address, where it is not AWS.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::url()))]
    pub endpoint: Option<String>,
    /// The SHA-256 of the object, in hexadecimal. For a single object only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = formats::sha256()))]
    pub sha256: Option<String>,
}

/// A container image that holds the files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OciSource {
    /// The image, best with its digest: `registry/name@sha256:…`.
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: String,
    /// Where in the image the model is: a GGUF file or the folder of an OpenVINO IR. Default: the image's root.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::relative_path()))]
    pub path: Option<String>,
}

/// A PersistentVolumeClaim that holds the files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.path) || !self.path.split('/').exists(part, part == '..')", "model.source.pvc.path must stay inside the volume: it may not contain '..'")])))]
pub struct PvcSource {
    /// The claim, of the same namespace. It is mounted read-only.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub claim: String,
    /// Where in the volume the model is: a GGUF file or the folder of an OpenVINO IR. Default: its root.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::relative_path()))]
    pub path: Option<String>,
}

/// What the files are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Format {
    /// Go by the names of the files.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// One GGUF file.
    #[serde(rename = "gguf")]
    Gguf,
    /// A folder with openvino_model.xml and its tokenizer.
    #[serde(rename = "openvino-ir")]
    OpenvinoIr,
}

/// An object of the same namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalReference {
    /// Its name.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
}

/// Where fetched files are kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("self.mode == 'none' || has(self.size)", "model.cache.size is needed with the modes perPod and shared: it is the size of the volume")])))]
pub struct Cache {
    /// `none`: each new pod fetches the model into scratch space of its node. `perPod`: the same, into a volume of
    /// its own that is made and removed with the pod. `shared`: a Job fetches it once into a volume that all
    /// replicas mount.
    #[serde(default)]
    pub mode: CacheMode,
    /// Bytes, as in `40Gi`: of the volume, or with the mode `none` the most that may be used of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "x-kubernetes-validations" = rules(&[("isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))", "model.cache.size must be a number of bytes, as in 40Gi")])))]
    pub size: Option<Quantity>,
    /// The StorageClass of the volumes. Default: the cluster's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class: Option<String>,
    /// How the shared volume may be mounted. With `ReadWriteOnce`, all replicas and what fetches for them are placed on one
    /// node.
    #[serde(default)]
    pub access_mode: AccessMode,
}

/// Who shares the files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheMode {
    /// Nobody: scratch space of the pod.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Nobody: a volume of the pod.
    #[serde(rename = "perPod")]
    PerPod,
    /// All replicas.
    #[serde(rename = "shared")]
    Shared,
}

/// How a volume may be mounted, in Kubernetes' words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AccessMode {
    /// By many nodes.
    #[default]
    ReadWriteMany,
    /// By one node.
    ReadWriteOnce,
}

fn main_branch() -> String {
    "main".to_owned()
}

fn hub() -> String {
    "https://huggingface.co".to_owned()
}

fn region() -> String {
    "us-east-1".to_owned()
}
