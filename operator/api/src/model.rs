//! The model, its source, and how its files reach the replicas.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::formats;
use crate::schema::{resources, rules};

/// The model that is served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.cache) || self.cache.mode == 'none' || !(has(self.source.pvc) || has(self.source.oci))", "model.cache must be omitted for a model in a volume or an image, because such a model is not fetched"), ("!has(self.fetch) || !(has(self.source.pvc) || has(self.source.oci))", "model.fetch must be omitted for a model in a volume or an image, because such a model is not fetched"), ("self.format == 'auto' || !(has(self.source.pvc) || has(self.source.oci))", "model.format must be omitted for a model in a volume or an image, because such a model is not fetched"), ("!has(self.credentialsSecretRef) || !(has(self.source.pvc) || has(self.source.oci))", "model.credentialsSecretRef applies only to fetched models (hf, http, s3); for a private image, use \
security.imagePullSecrets")])))]
pub struct Model {
    /// Name under which the model is served. Default: the name of this resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), extend("x-kubernetes-validations" = formats::model_name()))]
    pub name: Option<String>,

    /// Additional names under which the model is served.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 128)))]
    #[schemars(extend("x-kubernetes-list-type" = "set", "x-kubernetes-validations" = formats::model_names()))]
    pub aliases: Vec<String>,

    /// Source of the model's files. Exactly one of its fields must be set.
    pub source: Source,

    /// Format of the fetched files. `auto` detects the format from the file names. This field is allowed only for the
    /// sources `hf`, `http` and `s3`.
    #[serde(default)]
    pub format: Format,

    /// Secret with the credentials for fetching the model. The Secret must be in the namespace of the resource. It is
    /// mounted only into the container that fetches the model; the operator does not read it. Its keys depend on the
    /// source: `token` for `hf`; `token` (a bearer token), or `username` and `password`, for `http`; `accessKeyId`,
    /// `secretAccessKey` and, for temporary credentials, `sessionToken` for `s3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credentials_secret_ref: Option<LocalReference>,

    /// Storage for the fetched files. This field is allowed only for the sources `hf`, `http` and `s3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,

    /// Settings of the container that fetches the files. This field is allowed only for the sources `hf`, `http` and
    /// `s3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<Fetch>,
}

/// The settings of the container that fetches files, in a Job or in the pod of a replica.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
#[schemars(extend("x-kubernetes-validations" = rules(&[("!has(self.env) || !('OVFLEET_HF_REVISION' in self.env)", "model.fetch.env must not contain OVFLEET_HF_REVISION: the operator sets it"), ("!has(self.env) || !has(self.caBundle) || !('SSL_CERT_FILE' in self.env)", "model.fetch.env must not contain SSL_CERT_FILE, because model.fetch.caBundle sets it")])))]
pub struct Fetch {
    /// Environment variables, such as `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` for a proxy.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub env: BTreeMap<String, String>,
    /// ConfigMap with the CA certificates that the container trusts, such as the CA certificate of a proxy or a mirror.
    /// They replace the CA certificates of the image. Default: the CA certificates of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_bundle: Option<CaBundle>,
    /// Annotations of the ServiceAccount of the pods that fetch the model. Cloud providers use them to assign
    /// identities to pods.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub service_account_annotations: BTreeMap<String, String>,
    /// CPU, memory and ephemeral storage of the container. Default: requests and limits of 500m CPU and 256Mi memory.
    /// If `model.cache.mode` is `none` and `model.cache.size` is set, the default also includes an ephemeral storage
    /// request of that size.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources")]
    pub resources: Option<ResourceRequirements>,
}

/// A ConfigMap with certificates of certificate authorities, in PEM format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CaBundle {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub config_map: String,
    /// Key of the ConfigMap under which the certificates are stored in PEM format.
    #[serde(default = "ca_bundle_key")]
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::data_key()))]
    pub key: String,
}

fn ca_bundle_key() -> String {
    "ca.crt".to_owned()
}

/// The source of a model's files.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("[has(self.hf), has(self.http), has(self.s3), has(self.oci), has(self.pvc)].filter(given, given).size() == 1", "model.source must have exactly one of hf, http, s3, oci and pvc")])))]
pub struct Source {
    /// A repository on the Hugging Face Hub.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hf: Option<HuggingFaceSource>,
    /// A GGUF file on a web server.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http: Option<HttpSource>,
    /// Objects in S3 or in a compatible service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3Source>,
    /// A container image that contains the files and is mounted as a volume. The container runtime must support image
    /// volumes. The cluster must run Kubernetes 1.35 or later, or 1.33 or later with the feature gate `ImageVolume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oci: Option<OciSource>,
    /// A PersistentVolumeClaim with the files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcSource>,
}

/// A repository on the Hugging Face Hub.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HuggingFaceSource {
    /// Repository, in the form `owner/name`.
    #[schemars(
        length(max = 256),
        extend("x-kubernetes-validations" = formats::repository())
    )]
    pub repo: String,
    /// Branch, tag or full commit hash. The commit that is fetched first is stored in `status.modelRevision`. Replicas
    /// that start later fetch the same commit until `endpoint`, `repo` or `revision` changes.
    #[serde(default = "main_branch")]
    #[schemars(length(min = 1, max = 256), extend("x-kubernetes-validations" = formats::revision()))]
    pub revision: String,
    /// Patterns for the paths of the files to fetch, such as `*Q4_K_M.gguf`. `*` matches any sequence of characters,
    /// including `/`. If a pattern matches the first part of a split GGUF model, all parts are fetched. Default: all
    /// files whose paths do not begin with `.`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), inner(length(min = 1, max = 512)))]
    pub files: Vec<String>,
    /// URL of the Hub or of a mirror.
    #[serde(default = "hub")]
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::url()))]
    pub endpoint: String,
}

/// A GGUF file on a web server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpSource {
    /// URL of the file. If the file is a part of a split GGUF model, all parts are fetched.
    #[schemars(length(max = 2048), extend("x-kubernetes-validations" = formats::url()))]
    pub url: String,
    /// SHA-256 of the file, in hexadecimal. A file with another digest is rejected. This field is not supported for a
    /// split model. Default: the file is not verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = formats::sha256()))]
    pub sha256: Option<String>,
}

/// Objects in S3 or in a compatible service.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct S3Source {
    /// Name of the bucket.
    #[schemars(length(min = 3, max = 63), extend("x-kubernetes-validations" = formats::bucket()))]
    pub bucket: String,
    /// Key of the object. If it ends with `/`, all objects with this prefix are fetched. If the object is a part of a
    /// split GGUF model, all parts are fetched.
    #[schemars(length(min = 1, max = 1024))]
    pub key: String,
    /// Region of the bucket. Requests with credentials are signed for this region.
    #[serde(default = "region")]
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-validations" = formats::region()))]
    pub region: String,
    /// URL of the service. Default: the AWS endpoint of the region.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), extend("x-kubernetes-validations" = formats::url()))]
    pub endpoint: Option<String>,
    /// SHA-256 of the object, in hexadecimal. An object with another digest is rejected. This field is supported only
    /// for a single object. Default: objects are not verified.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-validations" = formats::sha256()))]
    pub sha256: Option<String>,
}

/// A container image with the files of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OciSource {
    /// Reference of the image, preferably with a digest: `registry/name@sha256:…`.
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::image()))]
    pub image: String,
    /// Path of the model in the image: a GGUF file, the first part of a split GGUF model, or the directory of an
    /// OpenVINO IR. Default: the root of the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::relative_path()))]
    pub path: Option<String>,
}

/// A PersistentVolumeClaim with the files of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PvcSource {
    /// Name of a claim in the namespace of the resource. The claim is mounted read-only.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub claim: String,
    /// Path of the model in the volume: a GGUF file, the first part of a split GGUF model, or the directory of an
    /// OpenVINO IR. Default: the root of the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-kubernetes-validations" = formats::relative_path()))]
    pub path: Option<String>,
}

/// The format of a model's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Format {
    /// The format is detected from the file names.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// A GGUF file, or the parts of a split GGUF model.
    #[serde(rename = "gguf")]
    Gguf,
    /// A directory with openvino_model.xml or openvino_language_model.xml, and a tokenizer.
    #[serde(rename = "openvino-ir")]
    OpenvinoIr,
}

/// A reference to a Secret in the same namespace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LocalReference {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253), extend("x-kubernetes-validations" = formats::object_name()))]
    pub name: String,
}

/// The storage of fetched files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[("self.mode == 'none' || has(self.size)", "model.cache.size is required with the modes perPod and shared, because it is the size of the volume")])))]
pub struct Cache {
    /// `none`: each pod fetches the model into ephemeral storage of its node. `perPod`: each pod fetches the model into
    /// a volume that is created and deleted with the pod. `shared`: a Job fetches the model once into a volume that all
    /// replicas mount.
    #[serde(default)]
    pub mode: CacheMode,
    /// Size in bytes, such as `40Gi`. With the modes `perPod` and `shared`, this field is required and is the size of
    /// the volume. To allow changes to `model.source`, a shared volume needs space for two models, because replicas
    /// serve the previous model until the new one has been fetched. With the mode `none`, this field is the `sizeLimit`
    /// of the `emptyDir` volume. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("maxLength" = 32, "x-kubernetes-validations" = rules(&[("isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))", "model.cache.size must be a positive number of bytes, such as 40Gi")])))]
    pub size: Option<Quantity>,
    /// StorageClass of the volumes. Default: the default StorageClass of the cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class: Option<String>,
    /// Access mode of the shared volume. With `ReadWriteOnce`, all replicas and the Job that fetches the model are
    /// placed on one node. Draining this node evicts all replicas at the same time, unless `disruption` sets a limit.
    #[serde(default)]
    pub access_mode: AccessMode,
}

/// The mode in which fetched files are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CacheMode {
    /// Each pod stores the files in ephemeral storage.
    #[default]
    #[serde(rename = "none")]
    None,
    /// Each pod stores the files in its own volume.
    #[serde(rename = "perPod")]
    PerPod,
    /// All replicas share a volume.
    #[serde(rename = "shared")]
    Shared,
}

/// The access mode of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AccessMode {
    /// Several nodes can mount the volume.
    #[default]
    ReadWriteMany,
    /// Only one node can mount the volume.
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
