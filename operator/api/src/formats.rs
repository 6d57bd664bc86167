//! Rules for the format of strings, each with a message. The schema's own `pattern` is not used, because the API
//! server would report only the regular expression.

use serde_json::Value;

use crate::schema::rules;

/// Returns the rule that a string must match `pattern`. The schema of the string needs a maximum length, because the
/// API server limits the cost of rules.
pub(crate) fn matches(pattern: &str, message: &str) -> Value {
    rules(&[(&format!("self.matches('{}')", escaped(pattern)), message)])
}

/// Returns the rule that all strings of a list must match `pattern`.
fn all_match(pattern: &str, message: &str) -> Value {
    rules(&[(&format!("self.all(item, item.matches('{}'))", escaped(pattern)), message)])
}

fn escaped(pattern: &str) -> String {
    pattern.replace('\\', "\\\\")
}

/// The rule for an image reference.
pub(crate) fn image() -> Value {
    matches(r"^[^\s]+$", "must be an image reference without whitespace, such as registry/name:tag")
}

/// The rule for a Hugging Face Hub repository.
pub(crate) fn repository() -> Value {
    matches(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        "must be a repository on the Hugging Face Hub, in the form OWNER/NAME",
    )
}

/// The rule for a branch, a tag or a commit.
pub(crate) fn revision() -> Value {
    matches(
        r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        "must be a branch, a tag or a commit: letters, digits, '.', '_', '/' and '-', beginning with a \
         letter or digit",
    )
}

/// The rule for an HTTP or HTTPS URL.
pub(crate) fn url() -> Value {
    matches(r"^https?://[^\s]+$", "must be a URL that begins with http:// or https://")
}

/// The rule for an HTTP URL, for connections without TLS.
pub(crate) fn plain_url() -> Value {
    matches(r"^http://[^\s]+$", "must be a URL that begins with http://, because TLS is not supported")
}

/// The rule for a list of hosts, each with or without a port. The operator also checks that addresses and ports are
/// valid.
pub(crate) fn hosts() -> Value {
    all_match(
        r"^([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$",
        "must contain only hosts, such as images.example.com or minio.storage.svc:9000, or 'all'",
    )
}

/// The rule for a list of networks. The operator also checks that addresses and prefixes are valid.
pub(crate) fn networks() -> Value {
    all_match(r"^[0-9A-Fa-f:.]+/[0-9]{1,3}$", "must contain only networks, such as 10.96.0.0/12")
}

/// The rule for a SHA-256 digest.
pub(crate) fn sha256() -> Value {
    matches(r"^[0-9a-f]{64}$", "must be a SHA-256 digest: 64 lowercase hexadecimal digits")
}

/// The rule for the name of an S3 bucket.
pub(crate) fn bucket() -> Value {
    matches(
        r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$",
        "must be the name of a bucket: lowercase letters, digits, '.' and '-', beginning and ending with a \
         letter or digit",
    )
}

/// The rule for the name of an S3 region.
pub(crate) fn region() -> Value {
    matches(
        r"^[a-z0-9-]+$",
        "must be the name of a region, such as eu-west-1: lowercase letters, digits and '-'",
    )
}

/// The rules for a path below the root of a volume or of an image.
pub(crate) fn relative_path() -> Value {
    rules(&[
        ("self.matches('^[^/].*$')", "must be a relative path: it must not begin with '/'"),
        (
            "!self.split('/').exists(part, part == '..')",
            "must stay inside the volume or image: it must not contain '..'",
        ),
    ])
}

/// The rule for the name of a Kubernetes object.
pub(crate) fn object_name() -> Value {
    matches(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "must be the name of an object: lowercase letters, digits, '-' and '.', beginning and ending with a letter or digit",
    )
}

/// The rule for a key of a Secret or a ConfigMap.
pub(crate) fn data_key() -> Value {
    matches(
        r"^[-._a-zA-Z0-9]+$",
        "must be a key of a Secret or a ConfigMap: letters, digits, '-', '_' and '.'",
    )
}

/// The rule for the name of a model.
pub(crate) fn model_name() -> Value {
    matches(r"^[^\s,]+$", "must not contain whitespace or commas")
}

/// The rule for a duration in the notation of [`crate::Period`].
pub(crate) fn duration() -> Value {
    matches(
        "^[0-9]{1,9}(ms|s|m|h)$",
        "must be a whole number and a unit (ms, s, m, h), such as 500ms, 30s, 10m or 1h",
    )
}

/// The rule for a list of model names.
pub(crate) fn model_names() -> Value {
    let rule = format!("self.all(name, name.matches('{}'))", escaped(r"^[^\s,]+$"));
    rules(&[(&rule, "must not contain whitespace or commas")])
}

/// The rule for an OpenVINO device, or for a virtual device with a list of devices.
pub(crate) fn device() -> Value {
    const DEVICE: &str = r"(CPU|GPU)(\.[0-9]+)*";
    // `AUTO` excludes the devices with a `-` before their names, so `-NPU` is allowed.
    const CANDIDATE: &str = r"(-NPU|-?(CPU|GPU)(\.[0-9]+)*)";
    let pattern =
        format!(r"^({DEVICE}|AUTO(:{CANDIDATE}(,{CANDIDATE})*)?|(HETERO|MULTI):{DEVICE}(,{DEVICE})*)$");
    matches(
        &pattern,
        "must be CPU, GPU, a numbered device such as GPU.1, AUTO, or a list of devices after AUTO:, HETERO: or MULTI:, such as HETERO:GPU,CPU. NPU is not supported, because OpenVINO has no paged attention for it",
    )
}
