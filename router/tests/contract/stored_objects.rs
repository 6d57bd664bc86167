//! Tests stored objects: the router needs only the ID of an object to determine which replica stores it, and sends the
//! requests that refer to the object to this replica.

use std::net::TcpListener;

use crate::harness::*;

const PATH: &str = "/v3/responses";

fn with_store(store_id: u64) -> Upstream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Upstream::with_store(listener, "m", store_id, move |_, stream| {
        send(stream, &whole(&format!("\"{store_id}\"")))
    })
}

fn name(prefix: &str, store_id: u64) -> String {
    format!("{prefix}_{store_id:016x}{:032x}", 0x100)
}

/// Starts one router for each replica. A router sees only the answers that it forwards itself.
fn routers(replicas: &[&Upstream]) -> Vec<Router> {
    replicas.iter().map(|_| Router::start(replicas, &["--policy=round-robin"])).collect()
}

#[test]
fn a_reference_to_a_stored_object_reaches_its_replica_through_any_router() {
    let (one, two) = (with_store(1), with_store(2));
    for router in routers(&[&one, &two]) {
        for number in [1, 2, 2, 1, 2] {
            let (response, conversation) = (name("resp", number), name("conv", number));
            let expected = format!("\"{number}\"");
            for body in [
                format!(r#"{{"model":"m","input":"x","previous_response_id":"{response}"}}"#),
                format!(r#"{{"model":"m","input":"x","conversation":{{"id":"{conversation}"}}}}"#),
                format!(
                    r#"{{"model":"m","input":[{{"type":"item_reference","id":"{}"}}]}}"#,
                    name("msg", number)
                ),
            ] {
                assert_eq!(router.post(PATH, &body).body, expected, "{body}");
            }
            assert_eq!(router.get(&format!("{PATH}/{response}")).body, expected);
            assert_eq!(router.get(&format!("/v1/responses/{response}/input_items?limit=2")).body, expected);
            assert_eq!(router.post(&format!("{PATH}/{response}/cancel"), "").body, expected);
            assert_eq!(router.request("DELETE", &format!("{PATH}/{response}"), "", "").body, expected);
            assert_eq!(router.get(&format!("/v3/conversations/{conversation}/items")).body, expected);
            let answer = router.get(&format!("{PATH}/{response}"));
            let replica = if number == 1 { &one } else { &two };
            assert_eq!(answer.header("x-ovfleet-replica"), Some(replica.address.to_string().as_str()));
        }
        // A request that refers to no stored object can go to any replica. The round-robin policy alternates between
        // the replicas.
        let mut answers: Vec<String> =
            (0..2).map(|_| router.post(PATH, r#"{"model":"m","input":"x"}"#).body).collect();
        answers.sort();
        assert_eq!(answers, ["\"1\"", "\"2\""]);
    }
}

#[test]
fn an_object_that_no_replica_stores_is_a_404() {
    let one = with_store(1);
    let router = Router::start(&[&one], &[]);
    let lost = name("resp", 3);
    let answer = router.get(&format!("{PATH}/{lost}"));
    assert_eq!(answer.status, 404);
    assert!(
        answer.body.contains("\"code\":\"response_not_found\"") && answer.body.contains(&lost),
        "{answer:?}"
    );
    for lost in [lost.as_str(), "resp_1", ""] {
        let answer = router.post(PATH, &format!(r#"{{"model":"m","previous_response_id":"{lost}"}}"#));
        assert_eq!(answer.status, 404);
        assert!(answer.body.contains("\"code\":\"previous_response_not_found\""), "{answer:?}");
    }
    let answer = router.get(&format!("/v3/conversations/{}", name("conv", 3)));
    assert!(answer.status == 404 && answer.body.contains("\"conversation_not_found\""), "{answer:?}");
    assert!(one.seen().is_empty());
}

#[test]
fn a_stored_object_is_not_found_for_another_model() {
    let one = with_store(1);
    let other = Upstream::start("other", |_, stream| send(stream, &whole("{}")));
    let router = Router::start(&[&one, &other], &[]);
    let body = format!(r#"{{"model":"other","previous_response_id":"{}"}}"#, name("resp", 1));
    assert_eq!(router.post(PATH, &body).status, 404);
    assert_eq!(router.get(&format!("{PATH}/{}", name("resp", 1))).body, "\"1\"", "a path contains no model");
}

#[test]
fn errors_of_a_replica_are_passed_on_without_a_retry() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let full = Upstream::with_store(listener, "m", 1, |_, stream| {
        send(stream, &with_status("429 Too Many Requests", r#"{"error":{"message":"full"}}"#))
    });
    let other = with_store(2);
    let router = Router::start(&[&full, &other], &[]);
    let body = format!(r#"{{"model":"m","previous_response_id":"{}"}}"#, name("resp", 1));
    let answer = router.post(PATH, &body);
    assert_eq!((answer.status, answer.body.as_str()), (429, r#"{"error":{"message":"full"}}"#));
    assert_eq!((full.seen().len(), other.seen().len()), (1, 0));
}
