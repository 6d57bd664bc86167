//! Decides which addresses the server connects to on behalf of a client. This module is pure: it resolves no names.
//!
//! By default, only public addresses are allowed, so that no client can make the server send requests to internal
//! networks. `--allowed-media-networks` adds networks, but never link-local addresses or those of cloud metadata
//! services.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Networks with the addresses at which cloud providers serve metadata and credentials to virtual machines. No flag
/// allows these networks.
const CREDENTIAL_NETWORKS: [IpNet; 7] = [
    // Link-local addresses, including those of the metadata services of most clouds.
    v4([169, 254, 0, 0], 16),
    // Azure.
    v4([168, 63, 129, 16], 32),
    // Alibaba Cloud.
    v4([100, 100, 100, 200], 32),
    // Oracle Cloud.
    v4([192, 0, 0, 192], 32),
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),
    // Amazon.
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0], 32),
    // Google.
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0], 32),
];

/// The IPv4 addresses that are not public: the multicast addresses, and those that are not globally reachable according
/// to IANA's registry of special-purpose addresses. The networks also contain a few addresses that are globally
/// reachable.
const RESERVED_V4: [IpNet; 15] = [
    // "This host": on Linux, a connection to 0.0.0.0 reaches the local host.
    v4([0, 0, 0, 0], 8),
    v4([10, 0, 0, 0], 8),
    // Carrier-grade NAT. Some clusters assign these addresses to pods.
    v4([100, 64, 0, 0], 10),
    v4([127, 0, 0, 0], 8),
    v4([169, 254, 0, 0], 16),
    v4([172, 16, 0, 0], 12),
    v4([192, 0, 0, 0], 24),
    v4([192, 0, 2, 0], 24),
    // 6to4 relays.
    v4([192, 88, 99, 0], 24),
    v4([192, 168, 0, 0], 16),
    // Benchmarking.
    v4([198, 18, 0, 0], 15),
    v4([198, 51, 100, 0], 24),
    v4([203, 0, 113, 0], 24),
    // Multicast.
    v4([224, 0, 0, 0], 4),
    // Reserved addresses, including the broadcast address.
    v4([240, 0, 0, 0], 4),
];

/// The block from which IPv6 addresses are assigned to public networks. All other addresses are unassigned or serve a
/// special purpose: for example, they are loopback, unique-local, link-local or multicast addresses, or contain an IPv4
/// address.
const GLOBAL_UNICAST_V6: IpNet = v6([0x2000, 0, 0, 0, 0, 0, 0, 0], 3);

/// The addresses within [`GLOBAL_UNICAST_V6`] that are not public.
const RESERVED_V6: [IpNet; 4] = [
    // Teredo, benchmarking and other protocol assignments.
    v6([0x2001, 0, 0, 0, 0, 0, 0, 0], 23),
    v6([0x2001, 0xdb8, 0, 0, 0, 0, 0, 0], 32),
    // 6to4 addresses, which can embed any IPv4 address.
    v6([0x2002, 0, 0, 0, 0, 0, 0, 0], 16),
    v6([0x3fff, 0, 0, 0, 0, 0, 0, 0], 20),
];

/// The well-known prefix of NAT64, through which clusters without IPv4 reach public IPv4 addresses.
const NAT64: IpNet = v6([0x64, 0xff9b, 0, 0, 0, 0, 0, 0], 96);

/// Decides whether the server may connect to an address.
#[derive(Clone, Debug, Default)]
pub(super) struct AddressPolicy {
    pub(super) allowed_networks: Vec<IpNet>,
}

impl AddressPolicy {
    /// Whether the server may connect to the address.
    pub(super) fn permits(&self, address: IpAddr) -> bool {
        if is_never_allowed(address) {
            return false;
        }
        let destination = destination(address);
        is_public(destination) || self.allowed_networks.iter().any(|network| network.contains(&destination))
    }
}

/// Whether the address, or the IPv4 address in it, is in one of the [`CREDENTIAL_NETWORKS`], which no flag allows.
pub(super) fn is_never_allowed(address: IpAddr) -> bool {
    let offers_credentials =
        |address: IpAddr| CREDENTIAL_NETWORKS.iter().any(|network| network.contains(&address));
    offers_credentials(address)
        || embedded_v4(address).is_some_and(|embedded| offers_credentials(embedded.into()))
}

/// Returns the address that a connection to `address` reaches. For an IPv4-mapped address, the system connects to the
/// embedded IPv4 address. For an address with the NAT64 prefix, a NAT64 gateway does the same.
fn destination(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) if NAT64.contains(&address) => last_v4(v6).into(),
        canonical => canonical,
    }
}

/// Returns the IPv4 address in an IPv4-mapped, IPv4-compatible, NAT64 or 6to4 address.
fn embedded_v4(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(v6) = address else { return None };
    let segments = v6.segments();
    if segments[0] == 0x2002 {
        let bits = u32::from(segments[1]) << 16 | u32::from(segments[2]);
        return Some(Ipv4Addr::from_bits(bits));
    }
    let is_last = NAT64.contains(&address) || segments[..5] == [0; 5] && matches!(segments[5], 0 | 0xffff);
    is_last.then(|| last_v4(v6))
}

/// Returns the IPv4 address in the last 32 bits.
fn last_v4(address: Ipv6Addr) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() as u32)
}

fn is_public(address: IpAddr) -> bool {
    let is_in = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&address));
    match address {
        IpAddr::V4(_) => !is_in(&RESERVED_V4),
        IpAddr::V6(_) => GLOBAL_UNICAST_V6.contains(&address) && !is_in(&RESERVED_V6),
    }
}

const fn v4(octets: [u8; 4], prefix_bits: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::from_octets(octets), prefix_bits))
}

const fn v6(segments: [u16; 8], prefix_bits: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from_segments(segments), prefix_bits))
}

/// Parses a network in CIDR notation. The error is the message for the user.
pub(super) fn network(text: &str) -> Result<IpNet, String> {
    let network: IpNet = text.trim().parse().map_err(|_| {
        format!("{text:?} is not a network: use an address and a prefix length, e.g. 10.0.0.0/8 or fd00::/8")
    })?;
    if network.trunc() == network {
        Ok(network)
    } else {
        Err(format!("{text:?} has bits set after its prefix of {} bits", network.prefix_len()))
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{RngExt as _, SeedableRng as _};

    use super::*;

    fn permits(address: impl Into<IpAddr>) -> bool {
        AddressPolicy::default().permits(address.into())
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_of_private_and_special_networks_are_refused() {
        for refused in [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.0",
            "10.255.255.255",
            "100.64.0.0",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.255",
            "168.63.129.16",
            "169.254.0.0",
            "169.254.169.254",
            "169.254.170.2",
            "172.16.0.0",
            "172.31.255.255",
            "192.0.0.0",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.0.0",
            "192.168.255.255",
            "198.18.0.0",
            "198.19.255.255",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "239.255.255.255",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            // IPv4-compatible addresses are refused, even if they contain a public address.
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            // NAT64 addresses that embed an address that is not public, and one with the NAT64 prefix for local use.
            "64:ff9b::10.0.0.1",
            "64:ff9b::169.254.169.254",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:2::1",
            "2001:20::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "2002:a9fe:a9fe::1",
            "2002:808:808::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fdff:ffff::1",
            "fe80::1",
            "febf::1",
            "fec0::1",
            "ff02::1",
        ] {
            assert!(!permits(address(refused)), "{refused}");
        }
    }

    #[test]
    fn public_addresses_are_permitted() {
        for public in [
            "1.0.0.0",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "192.169.0.0",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2000::1",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2001:db7:ffff::1",
            "2001:db9::1",
            "2003::1",
            "2606:4700::1111",
            "3ffe:ffff::1",
        ] {
            assert!(permits(address(public)), "{public}");
        }
    }

    #[test]
    fn an_allowed_network_permits_its_addresses_but_no_credentials() {
        let policy = |networks: &[&str]| AddressPolicy {
            allowed_networks: networks.iter().map(|network| network.parse().unwrap()).collect(),
        };
        let given = policy(&["10.1.0.0/16", "fd12::/16"]);
        for allowed in ["10.1.2.3", "::ffff:10.1.2.3", "64:ff9b::10.1.2.3", "fd12::1", "8.8.8.8"] {
            assert!(given.permits(address(allowed)), "{allowed}");
        }
        for refused in ["10.2.0.0", "10.0.255.255", "127.0.0.1", "fd13::1", "::1"] {
            assert!(!given.permits(address(refused)), "{refused}");
            assert!(!is_never_allowed(address(refused)), "{refused}");
        }
        let everything = policy(&["0.0.0.0/0", "::/0"]);
        assert!(everything.permits(address("127.0.0.1")) && everything.permits(address("::1")));
        for refused in [
            "169.254.169.254",
            "169.254.170.23",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "64:ff9b::a9fe:a9fe",
            "2002:a9fe:a9fe::",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fe80::a9fe:a9fe",
        ] {
            assert!(!everything.permits(address(refused)), "{refused}");
            assert!(is_never_allowed(address(refused)), "{refused}");
        }
        // Allowing the NAT64 prefix does not allow the private addresses that are embedded in it.
        assert!(!policy(&["64:ff9b::/96"]).permits(address("64:ff9b::10.0.0.1")));
    }

    /// The first and the last address of each refused range of IPv4 addresses, written independently of the networks in
    /// [`RESERVED_V4`] and [`CREDENTIAL_NETWORKS`].
    const REFUSED: [(u32, u32); 17] = [
        (0x0000_0000, 0x00ff_ffff),
        (0x0a00_0000, 0x0aff_ffff),
        (0x6440_0000, 0x647f_ffff),
        (0x7f00_0000, 0x7fff_ffff),
        (0xa83f_8110, 0xa83f_8110),
        (0xa9fe_0000, 0xa9fe_ffff),
        (0xac10_0000, 0xac1f_ffff),
        (0xc000_0000, 0xc000_00ff),
        (0xc000_0200, 0xc000_02ff),
        (0xc058_6300, 0xc058_63ff),
        (0xc0a8_0000, 0xc0a8_ffff),
        (0xc612_0000, 0xc613_ffff),
        (0xc633_6400, 0xc633_64ff),
        (0xcb00_7100, 0xcb00_71ff),
        (0xe000_0000, 0xefff_ffff),
        (0xf000_0000, 0xffff_fffe),
        (0xffff_ffff, 0xffff_ffff),
    ];

    #[test]
    fn an_ipv4_address_is_treated_the_same_in_every_form() {
        let seed = 0x6d65_6469_6131;
        println!("seed: {seed:#x}");
        let mut random = StdRng::seed_from_u64(seed);
        let mut refusals = 0;
        for _ in 0..50_000 {
            // Half of the addresses are near the first or the last address of a range.
            let bits = if random.random_bool(0.5) {
                random.random()
            } else {
                let (first, last) = REFUSED[random.random_range(0..REFUSED.len())];
                let end = if random.random_bool(0.5) { first } else { last };
                end.wrapping_add(random.random_range(0..5_u32)).wrapping_sub(2)
            };
            let plain = Ipv4Addr::from_bits(bits);
            let is_refused = REFUSED.iter().any(|(first, last)| (*first..=*last).contains(&bits));
            refusals += u32::from(is_refused);
            let [high, low] = [(bits >> 16) as u16, bits as u16];
            assert_eq!(permits(plain), !is_refused, "{plain}");
            assert_eq!(permits(plain.to_ipv6_mapped()), !is_refused, "mapped {plain}");
            let nat64 = Ipv6Addr::from_segments([0x64, 0xff9b, 0, 0, 0, 0, high, low]);
            assert_eq!(permits(nat64), !is_refused, "{nat64}");
            assert!(!permits(plain.to_ipv6_compatible()), "compatible {plain}");
            let suffix = random.random();
            assert!(
                !permits(Ipv6Addr::from_segments([0x2002, high, low, 0, 0, 0, 0, suffix])),
                "6to4 {plain}"
            );
        }
        assert!((12_500..37_500).contains(&refusals), "{refusals}");
    }

    #[test]
    fn networks_are_written_as_address_and_prefix() {
        for valid in ["10.0.0.0/8", "0.0.0.0/0", "1.2.3.4/32", "::/0", "fd00::/8", "::1/128", " 10.0.0.0/8 "]
        {
            assert!(network(valid).is_ok(), "{valid}");
        }
        for invalid in
            ["", "10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/+8", "::/129", "x/8", "10/8", "1.2.3.4/8"]
        {
            assert!(network(invalid).is_err(), "{invalid}");
        }
        assert!(network("10.0.0.1/8").unwrap_err().contains("bits set after its prefix"));
    }
}
