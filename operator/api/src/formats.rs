//! Rules for texts: what each kind of text must look like, with a message that says so. The API server answers a violation
//! of the schema's own `pattern` with the bare regular expression, so none is used.

use serde_json::Value;

use crate::rules;

/// A rule for a text: it must match `pattern`. The text needs a maximal length in the schema, as the API server bounds the
/// cost of rules.
pub(crate) fn matches(pattern: &str, message: &str) -> Value {
    rules(&[(&format!("self.matches('{}')", escaped(pattern)), message)])
}

fn escaped(pattern: &str) -> String {
    pattern.replace('\\', "\\\\")
}

/// An image reference.
pub(crate) fn image() -> Value {
    matches(r"^[^\s]+$", "must be an image reference without white space, such as registry/name:tag")
}

/// A repository of the Hugging Face Hub.
pub(crate) fn repository() -> Value {
    matches(
        r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$",
        "must be a repository of the Hub, OWNER/NAME",
    )
}

/// A branch, a tag or a commit.
pub(crate) fn revision() -> Value {
    matches(
        r"^[A-Za-z0-9][A-Za-z0-9._/-]*$",
        "must be a branch, a tag or a commit: letters, digits, '.', '_', '/' and '-'",
    )
}

/// A URL of HTTP or HTTPS.
pub(crate) fn url() -> Value {
    matches(r"^https?://[^\s]+$", "must be a URL that begins with http:// or https://")
}

/// A SHA-256.
pub(crate) fn sha256() -> Value {
    matches(r"^[0-9a-f]{64}$", "must be a SHA-256: 64 hexadecimal digits in lower case")
}

/// A bucket of S3.
pub(crate) fn bucket() -> Value {
    matches(
        r"^[a-z0-9][a-z0-9.-]*[a-z0-9]$",
        "must be the name of a bucket: lower-case letters, digits, '.' and '-'",
    )
}

/// A region of S3.
pub(crate) fn region() -> Value {
    matches(r"^[a-z0-9-]+$", "must be the name of a region, such as eu-west-1")
}

/// A path below the root of a volume.
pub(crate) fn relative_path() -> Value {
    matches(r"^[^/].*$", "must be a relative path: it may not begin with '/'")
}

/// The name of a Kubernetes object.
pub(crate) fn object_name() -> Value {
    matches(
        r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
        "must be the name of an object: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    )
}

/// A key of a Secret or a ConfigMap.
pub(crate) fn data_key() -> Value {
    matches(
        r"^[-._a-zA-Z0-9]+$",
        "must be a key of a Secret or a ConfigMap: letters, digits, '-', '_' and '.'",
    )
}

/// A name of a model.
pub(crate) fn model_name() -> Value {
    matches(r"^[^\s,]+$", "must not contain white space or commas")
}

/// A duration, see [`crate::Period`].
pub(crate) fn duration() -> Value {
    matches(
        "^[0-9]{1,9}(ms|s|m|h)$",
        "must be a whole number and a unit (ms, s, m, h), such as 500ms, 30s, 10m or 1h",
    )
}

/// A list of names of a model.
pub(crate) fn model_names() -> Value {
    let rule = format!("self.all(name, name.matches('{}'))", escaped(r"^[^\s,]+$"));
    rules(&[(&rule, "must not contain white space or commas")])
}

/// A device of OpenVINO, or several behind one of its virtual devices.
pub(crate) fn device() -> Value {
    const DEVICE: &str = r"(CPU|GPU|NPU)(\.[0-9]+)*";
    let pattern =
        format!(r"^({DEVICE}|AUTO(:-?{DEVICE}(,-?{DEVICE})*)?|(HETERO|MULTI):{DEVICE}(,{DEVICE})*)$");
    matches(
        &pattern,
        "must be CPU, GPU, NPU, a numbered one such as GPU.1, AUTO, or AUTO:, HETERO: or MULTI: with a list of them",
    )
}
