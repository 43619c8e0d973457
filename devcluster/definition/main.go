// Command check-definition prints why the API server of the pinned Kubernetes would refuse a CustomResourceDefinition.
package main

import (
	"context"
	"fmt"
	"os"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
)

func main() {
	definition, err := read(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	refusals := validation.ValidateCustomResourceDefinition(context.Background(), definition)
	for _, refusal := range refusals {
		fmt.Println(refusal)
	}
	if len(refusals) > 0 {
		os.Exit(1)
	}
}

func read(path string) (*apiextensions.CustomResourceDefinition, error) {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	definition := &apiextensions.CustomResourceDefinition{}
	decoder := serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder(apiextensions.SchemeGroupVersion)
	if _, _, err := decoder.Decode(data, nil, definition); err != nil {
		return nil, err
	}
	// The API server records the stored versions before it validates.
	for _, version := range definition.Spec.Versions {
		if version.Storage {
			definition.Status.StoredVersions = []string{version.Name}
		}
	}
	return definition, nil
}
