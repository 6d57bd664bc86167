//! Checks that the modules of a crate do not import each other in cycles.
//!
//! A module imports another module if it names an item of the other module, in a `use` or by path. A re-exported item
//! counts as an item of the module that defines it, so the re-exports of `lib.rs` form no cycles. Declaring a module is
//! not an import, and test modules are ignored.

use std::collections::{BTreeMap, BTreeSet};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::{
    Finding,
    syntax::{RustFile, is_test_only, type_name},
};

/// The names of the modules on the path from the root of the crate to a module.
type ModulePath = Vec<String>;

/// Finds the cycles among the modules of a crate.
#[must_use]
pub fn module_cycles(files: &[RustFile]) -> Vec<Finding> {
    let graph = ModuleGraph::new(files);
    graph.cycles().into_iter().map(|cycle| graph.finding(&cycle)).collect()
}

#[derive(Default)]
struct Module {
    file: String,
    children: BTreeSet<String>,
    items: BTreeSet<String>,
    /// The imported names and the absolute paths within the crate that they refer to.
    imports: BTreeMap<String, ModulePath>,
    /// The modules that the module glob-imports.
    globs: Vec<ModulePath>,
    /// The absolute paths that the code of the module names.
    paths: Vec<ModulePath>,
}

#[derive(Default)]
struct ModuleGraph {
    modules: BTreeMap<ModulePath, Module>,
    edges: BTreeMap<ModulePath, BTreeSet<ModulePath>>,
}

impl ModuleGraph {
    fn new(files: &[RustFile]) -> Self {
        let mut graph = Self::default();
        let test_modules: BTreeSet<ModulePath> = files.iter().flat_map(test_modules).collect();
        for file in files {
            let Some(path) = &file.module else { continue };
            let is_test = (1..=path.len()).any(|length| test_modules.contains(&path[..length]));
            if !is_test {
                graph.modules.insert(path.clone(), Module { file: file.path.clone(), ..Module::default() });
            }
        }
        let paths: Vec<ModulePath> = graph.modules.keys().cloned().collect();
        for path in &paths {
            if let Some((name, parent)) = path.split_last()
                && let Some(parent) = graph.modules.get_mut(parent)
            {
                parent.children.insert(name.clone());
            }
        }
        for file in files {
            let Some(path) = &file.module else { continue };
            let Some(mut module) = graph.modules.remove(path) else { continue };
            Collector { path, module: &mut module, depth: 0 }.visit_file(&file.syntax);
            graph.modules.insert(path.clone(), module);
        }
        for path in &paths {
            let module = &graph.modules[path];
            let named = module.imports.values().chain(&module.globs).chain(&module.paths);
            let targets = named.filter_map(|named| graph.resolve(named, 0)).filter(|target| target != path);
            let targets = targets.collect();
            graph.edges.insert(path.clone(), targets);
        }
        graph
    }

    /// The module that defines the item at an absolute path; `None` for an item of another crate.
    fn resolve(&self, named: &[String], depth: usize) -> Option<ModulePath> {
        // The depth is limited, because imports may refer to each other in cycles.
        const DEPTH_MAX: usize = 16;
        let mut at = ModulePath::new();
        for (index, name) in named.iter().enumerate() {
            let module = self.modules.get(&at)?;
            let rest = &named[index + 1..];
            if module.children.contains(name) && (!rest.is_empty() || !module.imports.contains_key(name)) {
                at.push(name.clone());
            } else if module.items.contains(name) || depth == DEPTH_MAX {
                return Some(at);
            } else if let Some(import) = module.imports.get(name) {
                let whole = [import, rest].concat();
                return if whole == named { Some(at) } else { self.resolve(&whole, depth + 1) };
            } else {
                let of_glob = module.globs.iter().find_map(|glob| {
                    let inner = self.modules.get(glob)?;
                    let has_name = inner.items.contains(name) || inner.imports.contains_key(name);
                    has_name.then(|| [glob, &named[index..]].concat())
                });
                return match of_glob {
                    Some(whole) => self.resolve(&whole, depth + 1),
                    None => Some(at),
                };
            }
        }
        Some(at)
    }

    /// The strongly connected components with more than one module.
    fn cycles(&self) -> Vec<Vec<ModulePath>> {
        let reachable: BTreeMap<&ModulePath, BTreeSet<&ModulePath>> =
            self.modules.keys().map(|path| (path, self.reachable(path))).collect();
        let mut grouped = BTreeSet::new();
        let mut cycles = Vec::new();
        for path in self.modules.keys() {
            if grouped.contains(path) {
                continue;
            }
            let is_mutual =
                |other: &&ModulePath| reachable[path].contains(other) && reachable[other].contains(path);
            let group: Vec<ModulePath> = self.modules.keys().filter(is_mutual).cloned().collect();
            if group.len() > 1 {
                grouped.extend(group.iter().cloned());
                cycles.push(group);
            }
        }
        cycles
    }

    fn reachable(&self, start: &ModulePath) -> BTreeSet<&ModulePath> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&ModulePath> = self.edges[start].iter().collect();
        while let Some(path) = open.pop() {
            if reached.insert(path) {
                open.extend(&self.edges[path]);
            }
        }
        reached
    }

    fn finding(&self, cycle: &[ModulePath]) -> Finding {
        let imports = cycle.iter().map(|path| {
            let within = self.edges[path].iter().filter(|target| cycle.contains(target));
            let targets: Vec<String> = within.map(|target| name_of(target)).collect();
            format!("{} imports {}", name_of(path), targets.join(", "))
        });
        let imports: Vec<String> = imports.collect();
        let message = format!("{} modules import each other: {}", cycle.len(), imports.join("; "));
        Finding::new(&self.modules[&cycle[0]].file, message)
    }
}

fn name_of(path: &[String]) -> String {
    if path.is_empty() { "the root".to_owned() } else { path.join("::") }
}

/// The modules that a file declares only for tests.
fn test_modules(file: &RustFile) -> Vec<ModulePath> {
    let Some(path) = &file.module else { return Vec::new() };
    let mut modules = Vec::new();
    for item in &file.syntax.items {
        if let syn::Item::Mod(module) = item
            && is_test_only(&module.attrs)
        {
            modules.push([&path[..], &[module.ident.to_string()]].concat());
        }
    }
    modules
}

/// Collects the definitions and paths of a module. Inline modules count as parts of it.
struct Collector<'a> {
    path: &'a [String],
    module: &'a mut Module,
    /// The nesting depth of inline modules, in which `super` leads to a module of the same file.
    depth: usize,
}

impl Collector<'_> {
    /// The absolute path that `names` refers to; `None` for a path to another crate or to a local name.
    fn absolute(&self, names: &[String]) -> Option<ModulePath> {
        let mut base = self.path.to_vec();
        let mut depth = self.depth;
        let mut rest = names;
        match names.first()?.as_str() {
            "crate" => return Some(names[1..].to_vec()),
            "self" => rest = &names[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    match depth {
                        0 => drop(base.pop()?),
                        _ => depth -= 1,
                    }
                    rest = &rest[1..];
                }
            }
            first if self.module.children.contains(first) => {}
            _ => return None,
        }
        Some([&base[..], rest].concat())
    }

    fn import(&mut self, prefix: &[String], tree: &syn::UseTree) {
        let with = |name: &syn::Ident| [prefix, &[name.to_string()]].concat();
        match tree {
            syn::UseTree::Path(path) => self.import(&with(&path.ident), &path.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.import(prefix, tree)),
            syn::UseTree::Name(name) if name.ident == "self" => self.bind(prefix.last().cloned(), prefix),
            syn::UseTree::Name(name) => self.bind(Some(name.ident.to_string()), &with(&name.ident)),
            syn::UseTree::Rename(rename) => self.bind(Some(rename.rename.to_string()), &with(&rename.ident)),
            syn::UseTree::Glob(_) => {
                if let Some(path) = self.absolute(prefix) {
                    self.module.globs.push(path);
                }
            }
        }
    }

    fn bind(&mut self, name: Option<String>, names: &[String]) {
        let Some(path) = self.absolute(names) else { return };
        if let Some(name) = name.filter(|name| name != "_" && self.depth == 0) {
            self.module.imports.insert(name, path);
        } else {
            self.module.paths.push(path);
        }
    }

    fn define(&mut self, name: &syn::Ident) {
        if self.depth == 0 {
            self.module.items.insert(name.to_string());
        }
    }

    /// Collects the paths in the tokens of a macro call.
    fn collect_tokens(&mut self, tokens: TokenStream) {
        let mut names: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Ident(name) => {
                    if colons != 2 {
                        self.end_path(&mut names);
                    }
                    names.push(name.to_string());
                    colons = 0;
                }
                TokenTree::Punct(mark) if mark.as_char() == ':' && !names.is_empty() => colons += 1,
                TokenTree::Group(group) => {
                    self.end_path(&mut names);
                    self.collect_tokens(group.stream());
                }
                TokenTree::Punct(_) | TokenTree::Literal(_) => self.end_path(&mut names),
            }
        }
        self.end_path(&mut names);
    }

    fn end_path(&mut self, names: &mut Vec<String>) {
        if names.len() > 1
            && let Some(path) = self.absolute(names)
        {
            self.module.paths.push(path);
        }
        names.clear();
    }
}

impl<'ast> Visit<'ast> for Collector<'_> {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        match item {
            syn::Item::Mod(module) => {
                if let Some((_, items)) = &module.content
                    && !is_test_only(&module.attrs)
                {
                    self.define(&module.ident);
                    self.depth += 1;
                    items.iter().for_each(|item| self.visit_item(item));
                    self.depth -= 1;
                }
                return;
            }
            syn::Item::Const(item) => self.define(&item.ident),
            syn::Item::Fn(item) => self.define(&item.sig.ident),
            syn::Item::Macro(item) => item.ident.iter().for_each(|name| self.define(name)),
            syn::Item::Static(item) => self.define(&item.ident),
            item => type_name(item).into_iter().for_each(|name| self.define(name)),
        }
        visit::visit_item(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.import(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1
            && let Some(path) = self.absolute(&names)
        {
            self.module.paths.push(path);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.visit_path(&call.path);
        self.collect_tokens(call.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::File;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        let parse = |(path, text): &(&str, &str)| {
            RustFile::parse("a", &File::new(&format!("a/src/{path}"), text)).unwrap()
        };
        let files: Vec<RustFile> = files.iter().map(parse).collect();
        module_cycles(&files).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn finds_two_modules_that_import_each_other() {
        let expected = ["2 modules import each other: b imports c; c imports b"];
        let root = ("lib.rs", "mod b; mod c; pub use b::B; pub use c::C;");
        let b = ("b.rs", "use crate::c::C; pub struct B;");
        assert_eq!(messages(&[root, b, ("c.rs", "use crate::b::B; pub struct C;")]), expected);
        assert_eq!(messages(&[root, b, ("c.rs", "use crate::B; pub struct C;")]), expected);
        assert_eq!(messages(&[root, b, ("c.rs", "pub struct C(crate::b::B);")]), expected);
        assert_eq!(messages(&[root, b, ("c.rs", "pub struct C; fn f() { dbg!(super::b::B); }")]), expected);
        assert_eq!(messages(&[root, b, ("c.rs", "use super::b::*; pub struct C;")]), expected);
        assert_eq!(messages(&[root, b, ("c.rs", "pub struct C;")]), [""; 0]);
    }

    #[test]
    fn finds_a_parent_and_a_child_that_import_each_other() {
        let root = ("lib.rs", "mod b;");
        let child = ("b/c.rs", "use super::helper; pub fn f() { helper() }");
        let parent = ("b.rs", "mod c; pub fn helper() {} pub fn g() { c::f() }");
        assert_eq!(
            messages(&[root, parent, child]),
            ["2 modules import each other: b imports b::c; b::c imports b"]
        );
        assert_eq!(messages(&[root, ("b.rs", "mod c; pub fn helper() {}"), child]), [""; 0]);
    }

    #[test]
    fn finds_longer_cycles_through_re_exports() {
        let files = [
            ("lib.rs", "mod b; mod c; mod d; pub use d::D;"),
            ("b.rs", "use crate::{c}; pub fn b() { c::c() }"),
            ("c.rs", "use crate::D; pub fn c() {}"),
            ("d.rs", "pub struct D; fn d() { crate::b::b() }"),
        ];
        let expected = "3 modules import each other: b imports c; c imports d; d imports b";
        assert_eq!(messages(&files), [expected]);
    }

    #[test]
    fn siblings_that_use_re_exports_of_their_parent_form_no_cycle() {
        let files = [
            ("lib.rs", "mod b;"),
            ("b.rs", "mod c; mod d; pub use c::C; pub use d::D;"),
            ("b/c.rs", "pub struct C;"),
            ("b/d.rs", "use super::C; pub struct D(C);"),
        ];
        assert_eq!(messages(&files), [""; 0]);
    }

    #[test]
    fn test_modules_are_ignored() {
        let files = [
            ("lib.rs", "mod b; mod c;"),
            ("b.rs", "pub fn b() { crate::c::c() }\n#[cfg(test)]\nmod tests;"),
            ("b/tests.rs", "use super::*; use crate::c;"),
            ("c.rs", "pub fn c() {}\n#[cfg(test)]\nmod tests { use crate::b; }"),
        ];
        assert_eq!(messages(&files), [""; 0]);
    }
}
