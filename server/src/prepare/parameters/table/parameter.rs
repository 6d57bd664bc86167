//! A row of the table of parameters.

use crate::prepare::parameters::kind::Kind;

/// A parameter of an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parameter {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The default for people; empty for none.
    pub(crate) default: &'static str,
    pub(crate) required: bool,
    /// The other servers that have the parameter.
    pub(crate) peers: Peers,
    /// How this server supports it.
    pub(crate) support: Support,
    /// A note for people, above all about differences from the other servers.
    pub(crate) note: &'static str,
}

/// Which other servers have a parameter of this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peers {
    pub(crate) ovms: Peer,
    pub(crate) openai: Peer,
    pub(crate) vllm: Peer,
}

/// Whether another server has a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Has,
    /// The parameter has fewer options than here.
    Partly,
    Lacks,
}

/// How this server supports a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Support {
    /// The parameter has its effect.
    Works,
    /// The parameter is checked and has no effect, for the reason in the note.
    Accepted,
    /// A request with the parameter is rejected, for the reason in the note.
    Refused,
}

/// Creates a parameter that works, without a note.
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

/// All of the others have the parameter.
pub(super) const ALL: Peers = Peers { ovms: Peer::Has, openai: Peer::Has, vllm: Peer::Has };
pub(super) const OVMS: Peers = Peers { ovms: Peer::Has, openai: Peer::Lacks, vllm: Peer::Lacks };
pub(super) const OPENAI: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Has, vllm: Peer::Lacks };
pub(super) const VLLM: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Lacks, vllm: Peer::Has };
pub(super) const OVMS_OPENAI: Peers = Peers { ovms: Peer::Has, openai: Peer::Has, vllm: Peer::Lacks };
pub(super) const OVMS_VLLM: Peers = Peers { ovms: Peer::Has, openai: Peer::Lacks, vllm: Peer::Has };
pub(super) const OPENAI_VLLM: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Has, vllm: Peer::Has };
pub(super) const OVMS_PARTLY: Peers = Peers { ovms: Peer::Partly, openai: Peer::Has, vllm: Peer::Has };
/// None of the others has the parameter, except `openvino_genai`.
pub(super) const NOBODY: Peers = Peers { ovms: Peer::Lacks, openai: Peer::Lacks, vllm: Peer::Lacks };

/// A token ID.
pub(super) const TOKEN: Kind = Kind::Integer(0, u32::MAX as i64);
/// A number of tokens.
pub(super) const COUNT: Kind = Kind::Integer(0, u32::MAX as i64);
