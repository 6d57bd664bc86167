//! Tests the configuration file, which is reloaded while the router runs.

use std::io::Write as _;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use crate::access;
use crate::harness::*;

#[test]
fn a_changed_file_takes_effect_without_interrupting_streams() {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let old = Upstream::start("m", move |request, stream| {
        if !String::from_utf8_lossy(&request.body).contains("\"stream\":true") {
            return send(stream, &whole("\"old\""));
        }
        send(stream, STREAM);
        send(stream, &event("1"));
        gate.lock().unwrap().recv().unwrap();
        send(stream, &event("2"));
        send(stream, &event("[DONE]")) && send(stream, END)
    });
    let new = Upstream::start("m", |_, stream| send(stream, &whole("\"new\"")));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("router.yaml");
    std::fs::write(&path, format!("replica: [{}]\npolicy: round-robin\n", old.address)).unwrap();
    let router = Router::unready(&["--config", path.to_str().unwrap()]);
    router.await_log("ready");

    let mut stream = router.connect();
    stream.write_all(raw("POST", CHAT, "", &chat("m", true)).as_bytes()).unwrap();
    read_until(&mut stream, "data: 1\n\n");
    std::fs::write(&path, format!("replica: [{}]\npolicy: least-requests\n", new.address)).unwrap();
    await_condition("the new replica to be used", || {
        (router.post(CHAT, &chat("m", false)).body == "\"new\"").then_some(())
    });
    assert!(router.get("/debug/replicas").body.contains("least-requests"));
    go.send(()).unwrap();
    read_until(&mut stream, "data: [DONE]\n\n");

    // An invalid file does not change the configuration.
    for (wrong, said) in [("policy: best\n", "best"), ("polisy: kv\n", "polisy"), ("policy: [", "parse")] {
        std::fs::write(&path, wrong).unwrap();
        await_condition("the reason to be logged", || {
            let log = router.log();
            let line = log.lines().rev().find(|line| line.contains("failed to reload the configuration"))?;
            line.contains(said).then_some(())
        });
        assert_eq!(router.post(CHAT, &chat("m", false)).body, "\"new\"");
    }
    std::fs::remove_file(&path).unwrap();
    router.await_log("failed to reload a file");
    assert_eq!(router.post(CHAT, &chat("m", false)).body, "\"new\"");
}

#[test]
fn a_replica_removed_from_the_configuration_finishes_its_requests_and_gets_no_new_ones() {
    let (go, gate) = channel::<()>();
    let gate = Mutex::new(gate);
    let leaving = Upstream::start("m", move |_, stream| {
        gate.lock().unwrap().recv().unwrap();
        send(stream, &whole("\"late\""))
    });
    let staying = Upstream::start("m", |_, stream| send(stream, &whole("\"stays\"")));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("router.yaml");
    std::fs::write(&path, format!("replica: {}\n", leaving.address)).unwrap();
    let router = Router::unready(&["--config", path.to_str().unwrap()]);
    router.await_log("ready");
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| router.post(CHAT, &chat("m", false)));
        await_condition("the request to arrive", || (leaving.seen().len() == 1).then_some(()));
        std::fs::write(&path, format!("replica: {}\n", staying.address)).unwrap();
        router.await_log("a replica was removed");
        await_condition("the other replica to be used", || {
            (router.post(CHAT, &chat("m", false)).body == "\"stays\"").then_some(())
        });
        go.send(()).unwrap();
        assert_eq!(waits.join().unwrap().body, "\"late\"");
    });
    assert_eq!(leaving.seen().len(), 1);
}

#[test]
fn keys_that_are_removed_from_the_configuration_are_required_until_a_restart() {
    let upstream = Upstream::start("m", |_, stream| send(stream, &whole("{}")));
    let (directory, _) = access::file("alpha\n");
    let (keys, path) = (directory.path().join("keys"), directory.path().join("router.yaml"));
    let replica = format!("replica: {}\n", upstream.address);
    std::fs::write(&path, format!("{replica}api-keys: {}\n", keys.display())).unwrap();
    let router = Router::unready(&["--config", path.to_str().unwrap()]);
    router.await_log("ready");
    let status = |key: &str| {
        let headers = format!("authorization: Bearer {key}\r\n");
        router.request("POST", CHAT, &headers, &chat("m", false)).status
    };
    assert_eq!(status("alpha"), 200);
    std::fs::write(&path, &replica).unwrap();
    router.await_log("reloaded the configuration");
    assert!(router.log().contains("flag=\"api-keys\""), "{}", router.log());
    assert_eq!(router.post(CHAT, &chat("m", false)).status, 401);
    // The file with the keys is still watched.
    std::fs::write(&keys, "beta\n").unwrap();
    await_condition("the keys to be replaced", || (status("beta") == 200).then_some(()));
    assert_eq!(status("alpha"), 401);
}

#[test]
fn a_changed_read_timeout_applies_to_new_connections() {
    let upstream = Upstream::start("m", |_, stream| send(stream, &whole("{}")));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("router.yaml");
    let write = |read_timeout: &str, policy: &str| {
        let replica = upstream.address;
        let text = format!("replica: {replica}\nread-timeout: {read_timeout}\npolicy: {policy}\n");
        std::fs::write(&path, text).unwrap();
    };
    write("200ms", "kv");
    let router = Router::unready(&["--config", path.to_str().unwrap()]);
    router.await_log("ready");
    let reload = |policy: &str| {
        write("1h", policy);
        await_condition("the file to be reloaded", || {
            router.get("/debug/replicas").body.contains(policy).then_some(())
        });
    };
    reload("round-robin");
    let request = raw("POST", CHAT, "", &chat("m", false));
    let (beginning, rest) = request.split_at(20);
    let mut slow = router.connect();
    slow.write_all(beginning.as_bytes()).unwrap();
    // The router checks the file every 500 ms, so this reload takes longer than the previous timeout of 200 ms.
    reload("least-requests");
    slow.write_all(rest.as_bytes()).unwrap();
    assert_eq!(Answer::read(&mut slow).status, 200);
}
