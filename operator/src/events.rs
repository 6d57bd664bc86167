//! Decides which changes of conditions are published as Kubernetes events. This module is pure: the controller
//! publishes the events.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::runtime::events::{Event, EventType};
use operator_api::{LlmDeploymentStatus, conditions};

/// Returns the events for the changes from the previous status to the next one.
#[must_use]
pub fn transitions(previous: Option<&LlmDeploymentStatus>, next: &LlmDeploymentStatus) -> Vec<Event> {
    let mut events = Vec::new();
    for condition in &next.conditions {
        let before = previous
            .and_then(|previous| previous.conditions.iter().find(|known| known.type_ == condition.type_));
        let is_same = before.is_some_and(|before| {
            before.status == condition.status
                && (before.reason == condition.reason || condition.status == "True")
        });
        let name = condition.type_.as_str();
        let holds = condition.status == "True";
        let is_bad = holds == (name == conditions::DEGRADED);
        // A condition that is false when it is first reported causes no event, except for `Accepted`. Changes of
        // `Progressing` cause no events, because the events of other conditions report the result.
        let is_initially_false = before.is_none() && !holds && name != conditions::ACCEPTED;
        if is_same || is_initially_false || name == conditions::PROGRESSING {
            continue;
        }
        let is_warning = is_bad && (name == conditions::DEGRADED || name == conditions::ACCEPTED);
        events.push(Event {
            type_: if is_warning { EventType::Warning } else { EventType::Normal },
            reason: condition.reason.clone(),
            note: Some(note(condition)),
            action: name.to_owned(),
            secondary: None,
        });
    }
    events
}

/// The text of the event about a change of a condition.
fn note(condition: &Condition) -> String {
    /// Size of the text of an event. The API server rejects longer texts.
    ///
    /// If exceeded: the text is truncated.
    const NOTE_BYTES_MAX: usize = 1024;
    let mut note = format!("{} is {}: {}", condition.type_, condition.status, condition.message);
    note.truncate(note.floor_char_boundary(NOTE_BYTES_MAX));
    note
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;

    fn status(conditions: &[(&str, &str, &str)]) -> LlmDeploymentStatus {
        let condition = |(name, status, reason): &(&str, &str, &str)| Condition {
            type_: (*name).to_owned(),
            status: (*status).to_owned(),
            reason: (*reason).to_owned(),
            message: "why".to_owned(),
            last_transition_time: Time(Timestamp::UNIX_EPOCH),
            observed_generation: None,
        };
        LlmDeploymentStatus { conditions: conditions.iter().map(condition).collect(), ..Default::default() }
    }

    fn published(previous: Option<&LlmDeploymentStatus>, next: &LlmDeploymentStatus) -> Vec<String> {
        transitions(previous, next)
            .into_iter()
            .map(|event| format!("{:?} {}", event.type_, event.reason))
            .collect()
    }

    #[test]
    fn changed_conditions_are_published_and_unchanged_ones_are_not() {
        let starting = status(&[
            ("Accepted", "True", "Accepted"),
            ("Degraded", "False", "AsExpected"),
            ("Ready", "False", "Starting"),
        ]);
        assert_eq!(published(None, &starting), ["Normal Accepted"]);
        assert_eq!(published(Some(&starting), &starting), [""; 0]);
        let ready = status(&[
            ("Accepted", "True", "Accepted"),
            ("Degraded", "False", "AsExpected"),
            ("Ready", "True", "Serving"),
        ]);
        assert_eq!(published(Some(&starting), &ready), ["Normal Serving"]);
        let broken = status(&[
            ("Accepted", "True", "Accepted"),
            ("Degraded", "True", "OOMKilled"),
            ("Ready", "False", "OOMKilled"),
        ]);
        assert_eq!(published(Some(&ready), &broken), ["Warning OOMKilled", "Normal OOMKilled"]);
    }

    #[test]
    fn a_long_message_is_truncated_between_two_characters() {
        let mut refused = status(&[("Accepted", "False", "RefusedByCluster")]);
        refused.conditions[0].message = "ä".repeat(2000);
        let note = transitions(None, &refused).remove(0).note.unwrap();
        assert_eq!((note.len(), note.chars().next_back()), (1023, Some('ä')), "{note}");
        assert!(note.starts_with("Accepted is False: ä"), "{note}");
    }
}
