// Saves graphs.
#include <openvino/pass/serialize.hpp>

#include "deferred.hpp"
#include "model.hpp"

extern "C" int ovfleet_save(ov_model_t* model, const char* xml, const char* bin) {
    return ovfleet::guarded([&] {
        ovfleet::fill_constants(*model->object);
        ov::pass::Serialize(xml, bin).run_on_model(model->object);
    });
}
