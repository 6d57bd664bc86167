use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;

const CONFIG: QueueConfig = QueueConfig {
    queue_requests: 4,
    queue_tokens: 1000,
    queue_timeout: Duration::from_secs(60),
    class_delay: Duration::from_secs(10),
};

fn request(class: PriorityClass, arrived: Instant) -> QueuedRequest {
    QueuedRequest { tenant: NO_TENANT, class, tokens: 100, arrived, deadline: None }
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

#[test]
fn the_first_request_is_served_first() {
    let (mut queue, now) = (Queue::new(CONFIG), Instant::now());
    let first = queue.push(request(PriorityClass::Standard, now), now).unwrap();
    let second = queue.push(request(PriorityClass::Standard, now), now).unwrap();
    assert_eq!(queue.head(), Some(first));
    assert_eq!(queue.dequeue(first, now + seconds(3)), Some(seconds(3)));
    assert_eq!(queue.dequeue(first, now), None);
    assert_eq!(queue.age(now + seconds(4)), Some(seconds(4)));
    assert_eq!(queue.head(), Some(second));
    queue.cancel(second, now);
    queue.cancel(second, now);
    assert_eq!((queue.head(), queue.len(), queue.tokens()), (None, 0, 0));
}

#[test]
fn a_request_that_returns_keeps_its_position() {
    let (mut queue, now) = (Queue::new(CONFIG), Instant::now());
    let newcomer = queue.push(request(PriorityClass::Standard, now + seconds(1)), now + seconds(1)).unwrap();
    let back = queue.push(request(PriorityClass::Standard, now), now + seconds(2)).unwrap();
    assert_eq!(queue.upcoming(9), [back, newcomer]);
    assert_eq!(queue.upcoming(1), [back]);
}

#[test]
fn a_class_is_served_before_lower_classes_for_a_limited_time() {
    let (mut queue, now) = (Queue::new(CONFIG), Instant::now());
    let bulk = queue.push(request(PriorityClass::Bulk, now), now).unwrap();
    let standard = queue.push(request(PriorityClass::Standard, now + seconds(5)), now + seconds(5)).unwrap();
    let interactive =
        queue.push(request(PriorityClass::Interactive, now + seconds(14)), now + seconds(14)).unwrap();
    for next in [interactive, standard] {
        assert_eq!(queue.head(), Some(next));
        queue.dequeue(next, now + seconds(15));
    }
    queue.push(request(PriorityClass::Interactive, now + seconds(21)), now + seconds(21)).unwrap();
    assert_eq!(queue.head(), Some(bulk), "the delay of its class has passed");
}

/// A request with 100 tokens of the tenant `tenant`.
fn of_tenant(tenant: u64, now: Instant) -> QueuedRequest {
    QueuedRequest { tenant, ..request(PriorityClass::Standard, now) }
}

#[test]
fn tenants_are_served_in_turns() {
    let config = QueueConfig { queue_requests: 100, queue_tokens: 100_000, ..CONFIG };
    let (mut queue, now) = (Queue::new(config), Instant::now());
    let push = |queue: &mut Queue, tenant| queue.push(of_tenant(tenant, now), now).unwrap();
    let backlog: Vec<Ticket> = (0..20).map(|_| push(&mut queue, 1)).collect();
    for &ticket in &backlog[..5] {
        assert_eq!(queue.dequeue(ticket, now), Some(Duration::ZERO));
    }
    let late: Vec<Ticket> = (0..3).map(|_| push(&mut queue, 2)).collect();
    let expected = [late[0], backlog[5], late[1], backlog[6], late[2], backlog[7], backlog[8]];
    assert_eq!(queue.upcoming(7), expected);
    for ticket in expected {
        assert_eq!(queue.head(), Some(ticket));
        queue.dequeue(ticket, now);
    }
}

#[test]
fn a_tenant_leaves_a_part_of_the_queue_to_others() {
    let config = QueueConfig { queue_requests: 16, queue_tokens: 10_000, ..CONFIG };
    let (mut queue, now) = (Queue::new(config), Instant::now());
    for _ in 0..14 {
        queue.push(of_tenant(1, now), now).unwrap();
    }
    assert!(queue.push(of_tenant(1, now), now).is_err());
    queue.push(of_tenant(2, now), now).unwrap();
    queue.push(of_tenant(NO_TENANT, now), now).unwrap();
    assert!(queue.push(of_tenant(2, now), now).is_err(), "the queue is full");
}

/// If requests of two tenants are always waiting, the numbers of tokens served for these tenants differ by at most the
/// tokens of one request.
#[test]
fn tenants_get_equal_parts_at_random() {
    for seed in 0..50 {
        let mut rng = StdRng::seed_from_u64(seed);
        let config = QueueConfig { queue_requests: 200, queue_tokens: 1_000_000, ..CONFIG };
        let (mut queue, now) = (Queue::new(config), Instant::now());
        let mut served = [0_u64; 2];
        for _ in 0..500 {
            for tenant in [1, 2] {
                let range = if tenant == 1 { 900 } else { 10 };
                let tokens = 1 + (rng.next_u64() % range) as u32;
                let _ = queue.push(QueuedRequest { tokens, ..of_tenant(tenant, now) }, now);
            }
            let ticket = queue.head().unwrap();
            let request = queue.entries[&ticket].request;
            served[request.tenant as usize - 1] += u64::from(request.tokens);
            queue.dequeue(ticket, now);
            queue.order.check_invariants();
            let is_waiting = |tenant| queue.order.of_tenant(tenant).is_some_and(|queue| queue.len() > 0);
            if !is_waiting(1) || !is_waiting(2) {
                break;
            }
            assert!(served[0].abs_diff(served[1]) <= 900, "seed {seed}: {served:?}");
        }
    }
}

#[test]
fn the_queue_is_limited_by_requests_and_by_tokens() {
    let (mut queue, now) = (Queue::new(CONFIG), Instant::now());
    let huge = QueuedRequest { tokens: 5000, ..request(PriorityClass::Standard, now) };
    let ticket = queue.push(huge, now).unwrap();
    assert!(queue.push(request(PriorityClass::Standard, now), now).is_err(), "no room for tokens");
    queue.dequeue(ticket, now);
    for _ in 0..4 {
        queue.push(QueuedRequest { tokens: 1, ..request(PriorityClass::Standard, now) }, now).unwrap();
    }
    assert!(queue.push(request(PriorityClass::Standard, now), now).is_err(), "no room for requests");
}

#[test]
fn a_rejected_request_gets_the_time_until_there_is_room() {
    let (mut queue, start) = (Queue::new(QueueConfig { queue_requests: 10, ..CONFIG }), Instant::now());
    assert_eq!(queue.retry_after(start), RETRY_AFTER_MIN, "the drain rate is unknown");
    let mut now = start;
    // One request is served every four seconds, and the queue is never empty.
    for _ in 0..10 {
        queue.push(request(PriorityClass::Standard, now), now).unwrap();
    }
    for _ in 0..20 {
        now += seconds(4);
        queue.dequeue(queue.head().unwrap(), now).unwrap();
        queue.push(request(PriorityClass::Standard, now), now).unwrap();
    }
    let QueueFull { retry_after } = queue.push(request(PriorityClass::Standard, now), now).unwrap_err();
    let retry_seconds = retry_after.as_secs_f64();
    assert!(
        (retry_seconds - 40.0).abs() < 1.0,
        "{retry_seconds} s for ten requests, of which one is served every four seconds"
    );
    let much_later = now + seconds(24 * 3600);
    assert_eq!(queue.retry_after(much_later), RETRY_AFTER_MAX, "nothing has been served for a day");
    // Time during which the queue is empty does not reduce the drain rate.
    while let Some(ticket) = queue.head() {
        queue.dequeue(ticket, now);
    }
    now += seconds(3600);
    queue.push(request(PriorityClass::Standard, now), now).unwrap();
    assert!(queue.retry_after(now) < seconds(5));
}

#[test]
fn classes_have_names() {
    for class in [PriorityClass::Interactive, PriorityClass::Standard, PriorityClass::Bulk] {
        assert_eq!(class.name().parse(), Ok(class));
    }
    let unknown = "Bulk".parse::<PriorityClass>().unwrap_err().to_string();
    assert_eq!(unknown, "unknown priority class \"Bulk\": use interactive, standard or bulk");
}

/// Requests, most of which are urgent, arrive faster than they are served. A request is overtaken only by requests of
/// higher classes that arrive within the delay of its class.
#[test]
fn no_request_starves_and_all_counts_hold_at_random() {
    for seed in 0..50 {
        let mut rng = StdRng::seed_from_u64(seed);
        let config = QueueConfig { queue_requests: 30, ..CONFIG };
        let (mut queue, mut now) = (Queue::new(config), Instant::now());
        let mut waiting: Vec<(Ticket, QueuedRequest, Instant)> = Vec::new();
        for _ in 0..2000 {
            now += Duration::from_millis(100);
            let class = match rng.next_u64() % 10 {
                0 => PriorityClass::Bulk,
                1 => PriorityClass::Standard,
                _ => PriorityClass::Interactive,
            };
            let new = QueuedRequest { tokens: 1 + (rng.next_u64() % 20) as u32, ..request(class, now) };
            if let Ok(ticket) = queue.push(new, now) {
                waiting.push((ticket, new, now));
            }
            if rng.next_u64() % 8 == 0 && !waiting.is_empty() {
                let (ticket, ..) = waiting.swap_remove((rng.next_u64() % waiting.len() as u64) as usize);
                queue.cancel(ticket, now);
            }
            if rng.next_u64() % 10 < 9
                && let Some(ticket) = queue.head()
            {
                let at = waiting.iter().position(|entry| entry.0 == ticket).unwrap();
                let (_, taken, since) = waiting.swap_remove(at);
                assert_eq!(queue.dequeue(ticket, now), Some(now - since));
                for (_, other, other_since) in &waiting {
                    let is_before = other.class <= taken.class && *other_since < since;
                    assert!(
                        !is_before,
                        "seed {seed}: an earlier request of the same or a higher class was skipped"
                    );
                    let delay = config.class_delay * other.class as u32;
                    assert!(
                        *other_since + delay >= since,
                        "seed {seed}: a request was overtaken after the delay of its class"
                    );
                }
            }
            assert_eq!(queue.len(), waiting.len());
            assert_eq!(queue.tokens(), waiting.iter().map(|entry| u64::from(entry.1.tokens)).sum::<u64>());
            assert!(queue.len() <= config.queue_requests && queue.tokens() <= config.queue_tokens);
            assert_eq!(queue.upcoming(usize::MAX).len(), queue.len());
            queue.order.check_invariants();
        }
    }
}
