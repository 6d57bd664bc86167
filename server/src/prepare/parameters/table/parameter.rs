//! A row of the table of parameters.

use crate::prepare::parameters::kind::Kind;

/// A parameter of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The default as it appears in the documentation, or an empty string if there is none.
    pub(crate) default: &'static str,
    pub(crate) required: bool,
    /// The other servers that have the parameter.
    pub(crate) peers: Peers,
    /// The level of support in this server.
    pub(crate) support: Support,
    /// A note for the documentation, mainly about differences from the other servers.
    pub(crate) note: &'static str,
}

/// The other servers that have a parameter with this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peers {
    pub(crate) ovms: PeerSupport,
    pub(crate) openai: PeerSupport,
    pub(crate) vllm: PeerSupport,
}

/// The level of support for a parameter in another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerSupport {
    Full,
    /// The other server has the parameter, but with fewer options.
    Partial,
    None,
}

/// The level of support for a parameter in this server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    /// The parameter is supported.
    Works,
    /// The parameter is checked but does not affect the content of the answer, for the reason in the note.
    Accepted,
    /// A request with the parameter is rejected, for the reason in the note.
    Refused,
}

/// Creates a supported parameter without a note.
pub(super) const fn row(name: &'static str, kind: Kind, default: &'static str, peers: Peers) -> Parameter {
    Parameter { name, kind, default, required: false, peers, support: Support::Works, note: "" }
}

impl Parameter {
    pub(super) const fn required(self) -> Self {
        Self { required: true, ..self }
    }

    pub(super) const fn note(self, note: &'static str) -> Self {
        Self { note, ..self }
    }

    pub(super) const fn accepted(self, note: &'static str) -> Self {
        Self { support: Support::Accepted, note, ..self }
    }

    pub(super) const fn refused(self, note: &'static str) -> Self {
        Self { support: Support::Refused, note, ..self }
    }
}

/// All other servers have the parameter.
pub(super) const ALL: Peers =
    Peers { ovms: PeerSupport::Full, openai: PeerSupport::Full, vllm: PeerSupport::Full };
pub(super) const OVMS: Peers =
    Peers { ovms: PeerSupport::Full, openai: PeerSupport::None, vllm: PeerSupport::None };
pub(super) const OPENAI: Peers =
    Peers { ovms: PeerSupport::None, openai: PeerSupport::Full, vllm: PeerSupport::None };
pub(super) const VLLM: Peers =
    Peers { ovms: PeerSupport::None, openai: PeerSupport::None, vllm: PeerSupport::Full };
pub(super) const OVMS_OPENAI: Peers =
    Peers { ovms: PeerSupport::Full, openai: PeerSupport::Full, vllm: PeerSupport::None };
pub(super) const OVMS_VLLM: Peers =
    Peers { ovms: PeerSupport::Full, openai: PeerSupport::None, vllm: PeerSupport::Full };
pub(super) const OPENAI_VLLM: Peers =
    Peers { ovms: PeerSupport::None, openai: PeerSupport::Full, vllm: PeerSupport::Full };
pub(super) const OVMS_PARTLY: Peers =
    Peers { ovms: PeerSupport::Partial, openai: PeerSupport::Full, vllm: PeerSupport::Full };
/// None of these servers has the parameter, but `openvino_genai` or an earlier version of vLLM may have it.
pub(super) const NO_PEERS: Peers =
    Peers { ovms: PeerSupport::None, openai: PeerSupport::None, vllm: PeerSupport::None };

/// A token ID.
pub(super) const TOKEN: Kind = Kind::Integer(0, u32::MAX as i64);
/// A number of tokens.
pub(super) const COUNT: Kind = Kind::Integer(0, u32::MAX as i64);
