//! The contracts between the processes of a fleet. `replica.proto` defines the reports of a replica to routers and the
//! call that drains a replica, and `router.proto` the reports of a router to the operator. The `.proto` files document
//! every field, and the code is generated from them. In addition, [`replica_token`] implements the token with which
//! routers authenticate themselves to replicas, and [`path`] normalizes the alternative spellings of paths that routers
//! and replicas accept.

pub mod path;
pub mod replica_token;

/// The current version of the contract.
pub mod v1alpha1 {
    #![expect(missing_docs, clippy::allow_attributes, reason = "generated")]
    tonic::include_proto!("ovfleet.v1alpha1");
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use crate::v1alpha1::{Load, State};

    #[test]
    fn a_decoded_report_equals_the_encoded_one_and_unknown_fields_are_ignored() {
        let load = Load {
            epoch: u64::MAX,
            report: 7,
            state: State::Serving.into(),
            models: vec!["m".to_owned()],
            ..Load::default()
        };
        let mut bytes = load.encode_to_vec();
        bytes.extend([0xE8, 0x01, 0x05]); // field 29, varint: from a later version
        assert_eq!(Load::decode(bytes.as_slice()).unwrap(), load);
    }
}
